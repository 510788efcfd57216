"""Measures transformers' `generate` on PyTorch CPU; run by the peer venv's Python.

    python transformers_driver.py HF_DIRECTORY WORKLOAD.json [DTYPE]

Owns nothing of ours: standard library and the peer only. Prints one JSON object per line: first
`{"event": "ready"}`, then `{"event": "value", "name": ..., "value": ...}` per measurement.
Concurrent streams are one batch, the best case `generate` has.
"""

from __future__ import annotations

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

THREADS = 2


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class TokenClock(transformers.StoppingCriteria):
    """Notes when each token was known; never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def token_times(model, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Generates exactly `num_tokens` per prompt, greedily; seconds from the call to each token."""
    clock = TokenClock()
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    if output.shape[1] - ids.shape[1] != num_tokens:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {output.shape[1] - ids.shape[1]}")
    return [moment - begin for moment in clock.times]


def measure(model, workload: dict) -> None:
    for _ in range(workload["repeats"]):
        times = token_times(model, [workload["decode_prompt"]], workload["decode_tokens"])
        emit("value", name="decode_tok_s", value=(len(times) - 1) / (times[-1] - times[0]))
        times = token_times(model, [workload["prefill_prompt"]], 1)
        emit("value", name="prefill_tok_s", value=len(workload["prefill_prompt"]) / times[0])
        for level in workload["levels"]:
            prompts = workload["concurrent_prompts"][:level]
            times = token_times(model, prompts, workload["concurrent_tokens"])
            rate = level * workload["concurrent_tokens"] / times[-1]
            emit("value", name=f"concurrent_{level}_tok_s", value=rate)


def main() -> None:
    directory, workload_path, *rest = sys.argv[1:]
    dtype = rest[0] if rest else "float32"
    with open(workload_path) as file:
        workload = json.load(file)
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    ).eval()
    token_times(model, [workload["decode_prompt"]], 2)
    emit("ready", version=transformers.__version__, torch=torch.__version__, dtype=dtype)
    measure(model, workload)


if __name__ == "__main__":
    main()
