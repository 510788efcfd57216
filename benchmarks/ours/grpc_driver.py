"""Measures our engine behind gRPC: `tpu-engine serve` as a subprocess, this process the client.

    python -m benchmarks.ours.grpc_driver CONFIG.yaml WORKLOAD.json

Owns server process and measuring; prints the lines of `benchmarks.ours.events`. `ready` carries
the seconds from the start of the server's process to its readiness.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from benchmarks.ours import events
from benchmarks.thread_times import grouped, thread_seconds
from server.client import EngineClient
from server.proto.tpu_engine.v1 import engine_pb2 as pb

STOP_S = 60
POLL_S = 0.05


class ServerProcess:
    """A running `tpu-engine serve`; its log is passed on to our standard error."""

    def __init__(self, config_path: str) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", "--config", config_path]
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--port", "0"], stderr=subprocess.PIPE, stdout=sys.stderr, text=True
        )
        assert self.process.stderr is not None
        self.address = self._wait_for_address(self.process.stderr)
        threading.Thread(target=_pass_on, args=(self.process.stderr,), daemon=True).start()

    def _wait_for_address(self, log: IO[str]) -> str:
        for line in log:
            print(line, end="", file=sys.stderr)
            found = re.search(r"listening on (\S+)", line)
            if found:
                return found.group(1)
        raise RuntimeError(f"the server ended with {self.process.wait()} before it listened")

    def stop(self) -> None:
        """Asks the server to drain; raises if it doesn't end cleanly."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}")


def _pass_on(log: IO[str]) -> None:
    for line in log:
        print(line, end="", file=sys.stderr)


async def token_times(client: EngineClient, ids: list[int], num_tokens: int) -> list[float]:
    """Generates exactly `num_tokens`; moments at which each token arrived."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), max_tokens=num_tokens, temperature=0, ignore_eos=True
    )
    times: list[float] = []
    async for event in client.generate(request):
        times += [time.perf_counter()] * len(event.delta.token_ids)
    if len(times) != num_tokens:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {len(times)}")
    return times


async def measure_single(client: EngineClient, workload: dict) -> None:
    times = await token_times(client, workload["decode_prompt"], workload["decode_tokens"])
    events.value("decode_tok_s", (len(times) - 1) / (times[-1] - times[0]))
    begin = time.perf_counter()
    times = await token_times(client, workload["prefill_prompt"], 1)
    events.value("prefill_tok_s", len(workload["prefill_prompt"]) / (times[0] - begin))


async def measure_level(
    client: EngineClient, pid: int, prompts: list[list[int]], num_tokens: int
) -> None:
    level, total = len(prompts), len(prompts) * num_tokens
    before, client_before = thread_seconds(pid), time.process_time()
    begin = time.perf_counter()
    await asyncio.gather(*(token_times(client, ids, num_tokens) for ids in prompts))
    seconds = time.perf_counter() - begin
    after, client_s = thread_seconds(pid), time.process_time() - client_before
    events.value(f"concurrent_{level}_tok_s", total / seconds)
    events.value(f"cpu_us_per_token_{level}.client", 1e6 * client_s / total)
    for group, cpu_s in grouped(pid, before, after).items():
        events.value(f"cpu_us_per_token_{level}.{group}", 1e6 * cpu_s / total)


async def wait_until_ready(client: EngineClient, server: ServerProcess) -> float:
    """Seconds from the start of the server's process until it says it is ready."""
    while True:
        status = await client.status()
        if status.state == pb.SERVER_STATE_READY:
            return time.perf_counter() - server.started_s
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode}")
        await asyncio.sleep(POLL_S)


async def run(server: ServerProcess, workload: dict) -> None:
    async with EngineClient(server.address) as client:
        events.ready(ready_s=await wait_until_ready(client, server))
        await token_times(client, workload["decode_prompt"], 2)
        compiled = (await client.status()).compile_count
        for _ in range(workload["repeats"]):
            await measure_single(client, workload)
            for level in workload["levels"]:
                prompts = workload["concurrent_prompts"][:level]
                await measure_level(
                    client, server.process.pid, prompts, workload["concurrent_tokens"]
                )
        status = await client.status()
        if status.compile_count != compiled or status.running:
            raise RuntimeError(f"the server compiled or kept something: {status}")


def main() -> None:
    config_path, workload_path = sys.argv[1:]
    workload = json.loads(Path(workload_path).read_text())
    server = ServerProcess(config_path)
    try:
        asyncio.run(run(server, workload))
    except BaseException:
        server.process.kill()
        raise
    server.stop()


if __name__ == "__main__":
    main()
