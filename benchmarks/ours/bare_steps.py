"""The bare step programs: what the device can do when nothing of ours stands in its way.

Owns a runner that keeps the plans it was given, and their replay as bare executable calls on
inputs packed beforehand: no scheduler, no batch building, no text, no read-back between steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from tpu_engine.model_runner import DispatchedStep, ModelRunner
from tpu_engine.step_plan import InFlight, StepPlan, StepResult


class RecordingRunner:
    """Passes steps through to `runner`; keeps their plans and the CPU time they took here.

    `thread_s` is CPU time of the calling thread inside the runner (packing, launching, waiting,
    and whatever part of the program XLA runs in the caller's thread).
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []
        self.thread_s = 0.0

    def clear(self) -> None:
        self.plans.clear()
        self.thread_s = 0.0

    def dispatch(self, plan: StepPlan) -> DispatchedStep:
        begin = time.thread_time()
        handle = self._runner.dispatch(plan)
        self.thread_s += time.thread_time() - begin
        self.plans.append(plan)
        return handle

    def collect(self, handle: InFlight) -> StepResult:
        begin = time.thread_time()
        result = self._runner.collect(handle)
        self.thread_s += time.thread_time() - begin
        return result


def bare_seconds(runner: ModelRunner, plans: Sequence[StepPlan]) -> float:
    """Seconds the executables of `plans` take one after another (values written don't matter).

    The runner must be idle.
    """
    calls = [(plan.shape, runner.pack(plan)) for plan in plans]
    begin = time.perf_counter()
    for shape, buffer in calls:
        results = runner.launch(shape, buffer)
    jax.block_until_ready(results)
    return time.perf_counter() - begin
