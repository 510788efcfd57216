"""A load generator over gRPC: jobs in, one sample per request out.

Owns arrival (closed loop or Poisson), measuring at the client, and the summary of samples. Knows
no command line and prints nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from server.client import EngineClient
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine.errors import InvalidConfig

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniformly distributed numbers of tokens, `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Reads "128" or "16-256"; raises `InvalidConfig` naming `option`."""
        low, dash, high = text.partition("-")
        if low.isdecimal() and (high.isdecimal() if dash else True):
            lengths = cls(int(low), int(high or low))
            if 1 <= lengths.low <= lengths.high:
                return lengths
        raise InvalidConfig(option, "a length such as 128, or a range such as 16-256", text)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives (seconds after the start), its prompt, its output tokens."""

    arrival_s: float
    prompt_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(slots=True)
class Sample:
    """What one request saw, in seconds of one clock; `error` is a status code's name."""

    arrival_s: float
    end_s: float = 0.0
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list[float])
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


def draw_jobs(
    num: int, prompt: Lengths, output: Lengths, vocab_size: int, rate: float | None, seed: int
) -> list[Job]:
    """`num` random jobs, the same for the same seed; with a `rate` they arrive as Poisson does."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    arrival_s = 0.0
    for _ in range(num):
        ids = tuple(rng.randrange(vocab_size) for _ in range(prompt.draw(rng)))
        jobs.append(Job(arrival_s, ids, output.draw(rng)))
        if rate is not None:
            arrival_s += rng.expovariate(rate)
    return jobs


async def run_jobs(
    client: EngineClient,
    jobs: Sequence[Job],
    concurrency: int | None,
    timeout_s: float,
    on_done: Callable[[Sample], None],
) -> list[Sample]:
    """Sends all jobs and returns their samples.

    `concurrency` None sends each job at its arrival time (open loop; waiting in a queue counts
    into its latency). Otherwise that many are open at any time and arrival times are ignored.
    """
    places = asyncio.Semaphore(concurrency or len(jobs))
    start_s = time.perf_counter()

    async def one(job: Job) -> Sample:
        if concurrency is None:
            await asyncio.sleep(max(0.0, start_s + job.arrival_s - time.perf_counter()))
        async with places:
            arrival_s = time.perf_counter() if concurrency else start_s + job.arrival_s
            sample = await _send(client, job, arrival_s, timeout_s)
        on_done(sample)
        return sample

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def _send(client: EngineClient, job: Job, arrival_s: float, timeout_s: float) -> Sample:
    sample = Sample(arrival_s, num_prompt_tokens=len(job.prompt_ids))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=job.prompt_ids),
        max_tokens=job.num_output_tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    last_s = 0.0
    try:
        async for response in client.generate(request, timeout_s):
            if response.WhichOneof("event") != "delta":
                continue
            now = time.perf_counter()
            if sample.first_s is None:
                sample.first_s = now
            else:
                sample.gaps_s.append(now - last_s)
            last_s = now
            sample.num_output_tokens += len(response.delta.token_ids)
    except grpc.aio.AioRpcError as error:
        sample.error = error.code().name
    sample.end_s = time.perf_counter()
    return sample


def summarize(samples: Sequence[Sample]) -> dict[str, object]:
    """Counts, throughput and percentiles (seconds) of the requests that succeeded.

    TTFT is arrival to first tokens, ITL the gap between two messages with tokens, E2E arrival to
    end. The duration runs from the first arrival to the last end.
    """
    good = [sample for sample in samples if not sample.error]
    duration_s = max(s.end_s for s in samples) - min(s.arrival_s for s in samples)
    num_output = sum(s.num_output_tokens for s in good)
    num_prompt = sum(s.num_prompt_tokens for s in good)
    return {
        "num_requests": len(samples),
        "num_failed": len(samples) - len(good),
        "errors": dict(Counter(s.error for s in samples if s.error)),
        "duration_s": duration_s,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "request_per_s": len(good) / duration_s,
        "output_tok_s": num_output / duration_s,
        "total_tok_s": (num_prompt + num_output) / duration_s,
        "ttft_s": percentiles([s.first_s - s.arrival_s for s in good if s.first_s is not None]),
        "itl_s": percentiles([gap for s in good for gap in s.gaps_s]),
        "e2e_s": percentiles([s.end_s - s.arrival_s for s in good]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, empty where there are no values."""
    if not values:
        return {}
    found = np.percentile(np.array(values), PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}
