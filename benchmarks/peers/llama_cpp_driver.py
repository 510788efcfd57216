"""Measures llama.cpp's own HTTP server (package xllamacpp); run by the peer venv's Python.

    python llama_cpp_driver.py MODEL.gguf WORKLOAD.json

Owns nothing of ours: standard library and the peer only. Prints one JSON object per line: first
`{"event": "ready"}`, then `{"event": "value", "name": ..., "value": ...}` per measurement. Decode
and prefill rates are the server's own timings, which favours it a little over a client's clock.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request

import xllamacpp  # pyright: ignore[reportMissingImports]

SLOTS = 32
TOKENS_PER_SLOT = 1024
THREADS = 2


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def start(model_path: str):
    params = xllamacpp.CommonParams()
    params.model.path = model_path
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * TOKENS_PER_SLOT
    params.cpuparams.n_threads = THREADS
    params.cpuparams_batch.n_threads = THREADS
    params.warmup = True
    params.port = 0
    return xllamacpp.Server(params)


class Client:
    """Sends completions of token ids and checks that the asked-for work was done."""

    def __init__(self, address: str) -> None:
        self._url = f"{address}/completion"

    def complete(self, prompt: list[int], num_tokens: int) -> dict[str, float]:
        """Generates exactly `num_tokens`; returns the server's timings."""
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            timings = json.load(reply)["timings"]
        if (timings["predicted_n"], timings["prompt_n"]) != (num_tokens, len(prompt)):
            raise RuntimeError(f"asked for {len(prompt)}+{num_tokens} tokens, got {timings}")
        return timings

    def total_rate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Output tokens per second of all prompts sent at once."""
        threads = [
            threading.Thread(target=self.complete, args=(prompt, num_tokens)) for prompt in prompts
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(prompts) * num_tokens / (time.perf_counter() - begin)


def measure(client: Client, workload: dict) -> None:
    for _ in range(workload["repeats"]):
        timings = client.complete(workload["decode_prompt"], workload["decode_tokens"])
        emit("value", name="decode_tok_s", value=timings["predicted_per_second"])
        timings = client.complete(workload["prefill_prompt"], 1)
        emit("value", name="prefill_tok_s", value=timings["prompt_per_second"])
        for level in workload["levels"]:
            prompts = workload["concurrent_prompts"][:level]
            rate = client.total_rate(prompts, workload["concurrent_tokens"])
            emit("value", name=f"concurrent_{level}_tok_s", value=rate)


def main() -> None:
    model_path, workload_path = sys.argv[1:]
    with open(workload_path) as file:
        workload = json.load(file)
    server = start(model_path)
    client = Client(server.listening_address)
    client.complete(workload["decode_prompt"], 1)
    emit("ready", version=xllamacpp.__version__, system=xllamacpp.get_system_info())
    measure(client, workload)


if __name__ == "__main__":
    main()
