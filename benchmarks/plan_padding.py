"""Useful fraction of executed tokens: the real scheduler and step loop in virtual time.

    python -m benchmarks.plan_padding --json FILE [--trace FILE] [--plan FILE]

Requests come at a trace's own times, faster or slower by a stated factor; without a trace they are
drawn from a stated synthetic mix with the same statistics. A step takes what a plain roofline of
Llama-3.1-8B on one v6e chip gives: only the clock depends on it, but the clock decides how many
requests run together. Owns traces, the virtual clock and the JSON.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import environment
from buckets.plan import Plan, PlanLimits, default_plan, purpose
from buckets.plan_file import plan_from_yaml
from buckets.shape import StepShape
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.kv_pages import PagePool
from tpu_engine.messages import Submit
from tpu_engine.request import Request, SamplingParams
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.step_plan import InFlight, StepPlan, StepResult

PAGE_SIZE = 16
MAX_MODEL_LEN = 16384
NUM_PAGES = 40_000
# Llama-3.1-8B in bfloat16 on one v6e chip (1.64 TB/s; half of 920 TFLOP/s): weights read once per
# step, 16 GFLOP per token, 131 kB of KV per position read.
WEIGHTS_S, TOKEN_S, KV_TOKEN_S, FIXED_S = 9.8e-3, 35e-6, 8.0e-8, 0.5e-3
SPEEDS = (0.25, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; seconds since its start."""

    at_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class _Dispatched:
    plan: StepPlan
    done_s: float


@dataclass(slots=True)
class VirtualRunner:
    """Runs nothing: a step ends after its roofline time. Counts steps and tokens per shape."""

    now_s: float = 0.0
    busy_until_s: float = 0.0
    steps: Counter[StepShape] = field(default_factory=Counter[StepShape])
    useful: Counter[StepShape] = field(default_factory=Counter[StepShape])

    def dispatch(self, plan: StepPlan) -> _Dispatched:
        self.steps[plan.shape] += 1
        self.useful[plan.shape] += plan.num_useful_tokens
        kv_tokens = int((plan.starts + plan.num_tokens).sum())
        compute_s = max(WEIGHTS_S, plan.shape.num_tokens * TOKEN_S)
        step_s = compute_s + kv_tokens * KV_TOKEN_S + FIXED_S
        self.busy_until_s = max(self.now_s, self.busy_until_s) + step_s
        return _Dispatched(plan, self.busy_until_s)

    def collect(self, handle: InFlight) -> StepResult:
        assert isinstance(handle, _Dispatched)
        self.now_s = max(self.now_s, handle.done_s)
        rows = handle.plan.num_rows
        tokens = np.full(rows, 5, np.int32)
        return StepResult(
            handle.plan.step_id, tokens, np.zeros(rows, np.float32), np.ones(rows, np.bool_)
        )


def azure_trace(path: Path, limit: int) -> list[Arrival]:
    """The first `limit` requests of an Azure 2023 LLM trace (CSV)."""
    with path.open() as file:
        rows = [row for _, row in zip(range(limit), csv.DictReader(file), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival(
            (at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        )
        for at, row in zip(times, rows, strict=True)
    ]


def synthetic_trace(limit: int, seed: int = 0) -> list[Arrival]:
    """A chat-like mix: Poisson arrivals at 5.5 per second, log-normal lengths.

    Prompts have a median of 1035 and a mean near 1240 tokens, outputs 141 and near 220: the
    statistics of the public conversation trace this stands in for.
    """
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / 5.5, limit))
    prompts = np.clip(rng.lognormal(np.log(1035), 0.6, limit), 1, 14_000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(141), 0.95, limit), 1, 1000).astype(int)
    rows = zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Arrival(*row) for row in rows]


def replay(plan: Plan, arrivals: Sequence[Arrival], speed: float) -> dict[str, object]:
    """Serves `arrivals`, `speed` times as fast as they came, and counts what was executed."""
    limits = SchedulerLimits(MAX_MODEL_LEN, PAGE_SIZE, max_waiting=len(arrivals))
    runner = VirtualRunner()
    loop = EngineLoop(Scheduler(plan, limits, PagePool(NUM_PAGES)), runner)
    waiting = deque(enumerate(arrivals, start=1))
    while waiting or loop.has_work:
        if not loop.has_work:
            runner.now_s = max(runner.now_s, waiting[0][1].at_s / speed)
        due: list[Submit] = []
        while waiting and waiting[0][1].at_s / speed <= runner.now_s:
            due.append(Submit(_request(*waiting.popleft(), speed)))
        loop.turn(due, lambda: runner.now_s)
    useful = sum(runner.useful.values())
    executed = sum(shape.num_tokens * n for shape, n in runner.steps.items())
    by_purpose: dict[str, list[int]] = {}
    for shape, n in runner.steps.items():
        pair = by_purpose.setdefault(purpose(shape), [0, 0])
        pair[0] += runner.useful[shape]
        pair[1] += shape.num_tokens * n
    return {
        "speed": speed,
        "requests_per_s": round(len(arrivals) / (arrivals[-1].at_s / speed), 2),
        "useful_fraction": round(useful / executed, 4),
        "steps": sum(runner.steps.values()),
        "useful_fraction_by_purpose": {k: round(u / e, 4) for k, (u, e) in by_purpose.items()},
        "executed_share_by_purpose": {
            k: round(e / executed, 4) for k, (_, e) in by_purpose.items()
        },
        "virtual_s": round(runner.now_s, 1),
        "tokens_per_s": round(useful / runner.now_s),
        "shapes": {
            f"{s.num_tokens}x{s.num_seqs}": [
                runner.steps[s],
                round(runner.useful[s] / max(1, s.num_tokens * runner.steps[s]), 3),
            ]
            for s in plan.shapes
        },
    }


def _request(number: int, arrival: Arrival, speed: float) -> Request:
    num_prompt = max(1, min(arrival.num_prompt, MAX_MODEL_LEN - 1))
    num_output = max(1, min(arrival.num_output, MAX_MODEL_LEN - num_prompt))
    params = SamplingParams(num_output, seed=number, ignore_eos=True)
    return Request(number, (7,) * num_prompt, params, arrival.at_s / speed)


def main(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    trace: Path | None = None,
    plan_file: Annotated[Path | None, typer.Option("--plan")] = None,
    requests: int = 2000,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
) -> None:
    """Prints and writes the useful fraction at every speed."""
    arrivals = synthetic_trace(requests) if trace is None else azure_trace(trace, requests)
    limits = PlanLimits(max_num_seqs, max_num_batched_tokens, MAX_MODEL_LEN // PAGE_SIZE)
    plan = default_plan(limits) if plan_file is None else plan_from_yaml(plan_file.read_text())
    plan.validate(limits)
    runs = [replay(plan, arrivals, speed) for speed in SPEEDS]
    report = {
        "schema_version": 1,
        "trace": "synthetic" if trace is None else trace.name,
        "requests": len(arrivals),
        "num_shapes": len(plan.shapes),
        "step_model": "roofline, Llama-3.1-8B bf16 on one v6e chip",
        "versions": environment.versions(),
        "runs": runs,
    }
    text = json.dumps(report, indent=2)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
