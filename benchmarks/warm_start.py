"""How long `tpu-engine serve` takes until its health service says SERVING, cold and warm.

    python -m benchmarks.warm_start --json FILE [--rounds N] [--model NAME]

Every round starts the server twice on a compile cache of its own: once while that is empty, once
when the first start has filled it. Seconds are from the start of the process; results are medians
over rounds. Owns rounds and JSON; the server's process is `benchmarks.ours.grpc_driver`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import grpc
import typer
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from benchmarks import environment
from benchmarks.cpu_serving import MODEL
from benchmarks.ours.grpc_driver import POLL_S, ServerProcess
from server.client import EngineClient

LIMIT_S = 1800.0
RESULTS = Path("benchmarks/results/warm_start.json")

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until it served, what it did for that, and the load before it.

    `compile_s` and `load_s` are the seconds compiling and loading took, as the server counts them.
    """

    serving_s: float
    programs_compiled: int
    programs_loaded: int
    compile_s: float
    load_s: float
    load_average: float
    calibration_s: float


async def serving_after(server: ServerProcess, channel: grpc.aio.Channel) -> float:
    """Seconds from the start of the server's process until its health service says SERVING."""
    health = cast("Any", health_pb2_grpc).HealthStub(channel)
    while time.perf_counter() - server.started_s < LIMIT_S:
        reply = await health.Check(health_pb2.HealthCheckRequest())
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return time.perf_counter() - server.started_s
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode}")
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"the server didn't serve within {LIMIT_S:.0f} s")


async def watch(server: ServerProcess, load_average: float, calibration_s: float) -> Start:
    """Waits until the server serves, and asks it what it has done."""
    async with EngineClient(server.address) as client:
        seconds = await serving_after(server, client.channel)
        status = await client.status()
    return Start(
        serving_s=round(seconds, 3),
        programs_compiled=status.compile_count,
        programs_loaded=status.load_count,
        compile_s=round(status.compile_s, 3),
        load_s=round(status.load_s, 3),
        load_average=load_average,
        calibration_s=round(calibration_s, 4),
    )


def start_once(config_path: Path) -> Start:
    """Starts a server, watches it and stops it."""
    load_average, calibration_s = os.getloadavg()[0], environment.calibration_s()
    server = ServerProcess(str(config_path))
    try:
        start = asyncio.run(watch(server, load_average, calibration_s))
    except BaseException:
        server.process.kill()
        raise
    server.stop()
    return start


def run_rounds(options: dict[str, object], rounds: int, work: Path) -> dict[str, list[Start]]:
    """Starts by kind ("cold", "warm"), in order of rounds."""
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    for number in range(1, rounds + 1):
        config = work / f"config.{number}.yaml"
        cache = work / f"compile_cache.{number}"
        config.write_text(yaml.safe_dump({**options, "compile_cache": str(cache)}))
        for kind, of_kind in starts.items():
            console.rule(f"round {number}/{rounds}: {kind}, load {os.getloadavg()[0]:.2f}")
            of_kind.append(start_once(config))
            console.print(f"  {of_kind[-1]}")
    return starts


def summarize(starts: dict[str, list[Start]]) -> dict[str, dict[str, float]]:
    """Medians of each kind of start."""
    return {
        kind: {
            name: round(statistics.median(getattr(start, name) for start in of_kind), 3)
            for name in ("serving_s", "programs_compiled", "programs_loaded", "compile_s", "load_s")
        }
        for kind, of_kind in starts.items()
    }


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where to write.")] = RESULTS,
    rounds: Annotated[int, typer.Option(min=1, help="Cold and warm starts.")] = 3,
    model: Annotated[str, typer.Option(help="What to serve, weights not quantised.")] = MODEL,
) -> None:
    """Measure cold and warm starts of the server, and write JSON."""
    json_file.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, object] = {"model": model, "quantize": "none"}
    start_load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="warm_start_") as folder:
        starts = run_rounds(options, rounds, Path(folder))
    medians = summarize(starts)
    results = {
        "benchmark": "warm_start",
        "engines": {"tpu_engine": medians},
        "options": options,
        "rounds": rounds,
        "versions": environment.versions(),
        **environment.commit(),
        "processor": environment.processor(),
        "load_average": {"start": start_load, "end": os.getloadavg()},
        "samples": {kind: [asdict(start) for start in of_kind] for kind, of_kind in starts.items()},
    }
    json_file.write_text(json.dumps(results, indent=2) + "\n")
    for kind, of_kind in medians.items():
        console.print(f"  {kind}: {of_kind}")
    console.print(f"written to {json_file}")


if __name__ == "__main__":
    typer.run(main)
