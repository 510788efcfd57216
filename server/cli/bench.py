"""`tpu-engine bench`: puts a load on a running server and prints what its clients saw.

Owns flags, table and JSON file. The load itself is `server.load`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tpu_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from server.load import Sample

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """Which load to put on which server.

    Attributes:
        server: address of the server (host:port).
        num_requests: requests to send.
        concurrency: requests open at any time; 8 where no rate is given.
        rate: requests per second, arriving at random (Poisson), instead of a concurrency.
        prompt_len: tokens of each prompt, a number or a range such as 16-256.
        output_len: tokens of each answer, a number or a range such as 16-256.
        seed: of prompts, lengths and arrivals; the same seed gives the same load.
        timeout_s: seconds after which a request counts as failed.
        json: file for the results.
    """

    server: str = "127.0.0.1:50051"
    num_requests: int = 64
    concurrency: int | None = None
    rate: float | None = None
    prompt_len: str = "128"
    output_len: str = "64"
    seed: int = 0
    timeout_s: float = 600.0
    json: str | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise InvalidConfig("rate", "absent where a concurrency is given", self.rate)
        for name in ("num_requests", "concurrency", "rate", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidConfig(name, "above 0", value)


OPTIONS = (BenchFlags,)


def bench(flags: BenchFlags) -> None:
    """Measure a running server: throughput, TTFT, ITL and end-to-end latency."""
    target = None if flags.json is None else writable(Path(flags.json))
    result = asyncio.run(_measure(flags))
    if target is not None:
        target.write_text(json.dumps(result, indent=2) + "\n")
    Console().print(_table(result))
    if result["num_failed"]:
        typer.echo(f"error: {result['num_failed']} requests failed: {result['errors']}", err=True)
        raise typer.Exit(1)


def writable(path: Path) -> Path:
    """`path`, once it is sure that a result can be written there; raises `OSError` if not."""
    with path.open("a"):
        return path


async def _measure(flags: BenchFlags) -> dict[str, Any]:
    from server.client import EngineClient
    from server.load import Lengths, draw_jobs, run_jobs, summarize

    prompt = Lengths.parse("prompt_len", flags.prompt_len)
    output = Lengths.parse("output_len", flags.output_len)
    concurrency = flags.concurrency
    if concurrency is None and flags.rate is None:
        concurrency = DEFAULT_CONCURRENCY
    async with EngineClient(flags.server) as client:
        info = await client.model_info()
        jobs = draw_jobs(
            flags.num_requests, prompt, output, info.vocab_size, flags.rate, flags.seed
        )
        before, cpu_s = await client.status(), time.process_time()
        with Progress(console=Console(stderr=True)) as bars:
            bar = bars.add_task("requests", total=len(jobs))

            def on_done(_: Sample) -> None:
                bars.advance(bar)

            samples = await run_jobs(client, jobs, concurrency, flags.timeout_s, on_done)
        cpu_s, after = time.process_time() - cpu_s, await client.status()
    counters = ("steps", "useful_tokens", "executed_tokens", "compile_count")
    return {
        "options": {**asdict(flags), "concurrency": concurrency},
        "model": info.model,
        "server_version": info.version,
        **summarize(samples),
        "server": {name: getattr(after, name) - getattr(before, name) for name in counters},
        "client_cpu_s": cpu_s,
        "load_average": os.getloadavg(),
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['model']}: {result['num_requests']} requests", min_width=60)
    for name in ("", "mean", "P50", "P90", "P99"):
        table.add_column(name, justify="left" if not name else "right")
    for title, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s")):
        values = cast("dict[str, float]", result[key])
        table.add_row(f"{title} (ms)", *(f"{value * 1000:.1f}" for value in values.values()))
    table.add_section()
    for title, key in (
        ("output tokens/s", "output_tok_s"),
        ("total tokens/s", "total_tok_s"),
        ("requests/s", "request_per_s"),
        ("duration (s)", "duration_s"),
    ):
        table.add_row(title, f"{result[key]:.2f}")
    table.add_row("failed", str(result["num_failed"]))
    return table
