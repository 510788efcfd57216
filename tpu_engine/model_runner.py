"""The model runner: executes step plans on the device, one dispatch and one read-back per step.

Owns weights, KV arrays and last sampled tokens; the arrays never leave. Knows executables only
through the compile cache and requests only through plans.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from buckets.compile_cache import CompileCache, MissingExecutable
from buckets.shape import StepShape
from tpu_engine.errors import CompileMiss, DeviceFault, EngineError
from tpu_engine.misses import Miss, MissLog
from tpu_engine.step_inputs import InputLayout, pack
from tpu_engine.step_plan import InFlight, Int32, StepPlan, StepResult
from tpu_engine.step_program import StepState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DispatchedStep:
    """A step the device works on; `results` is the array its tokens will be read from."""

    plan: StepPlan
    results: jax.Array


class ModelRunner:
    """Implements the `Runner` protocol on JAX devices."""

    def __init__(
        self,
        weights: nnx.State,
        state: StepState,
        executables: CompileCache,
        misses: MissLog,
        on_miss: str = "refuse",
    ) -> None:
        """`on_miss`: what becomes of a step without an executable; `misses` takes note of it."""
        self._misses = misses
        self._on_miss = on_miss
        self._weights = weights
        self._state = state
        self._executables = executables
        self._max_num_seqs = state.last_tokens.shape[0]
        self._layouts: dict[StepShape, InputLayout] = {}
        self._dispatched: deque[int] = deque()

    def dispatch(self, plan: StepPlan) -> DispatchedStep:
        """Starts the step; raises `CompileMiss` where the plan's shape has no executable."""
        try:
            try:
                self._executables.get(plan.shape)
            except MissingExecutable:
                self._miss(plan)
            results = self.launch(plan.shape, self.pack(plan))
        except RuntimeError as error:  # also "array has been deleted", after an earlier fault
            raise DeviceFault(f"step {plan.step_id} could not be started: {error}") from error
        self._dispatched.append(plan.step_id)
        return DispatchedStep(plan, results)

    def _miss(self, plan: StepPlan) -> None:
        """Gets the executable after all where that is wanted; raises `CompileMiss` otherwise."""
        shape, ids = plan.shape, tuple(plan.request_ids.tolist())
        why = self._executables.why_missing(shape)
        if self._on_miss == "refuse":
            miss = Miss(shape, ids, why, "refused", 0.0)
        else:
            record = self._executables.build_missing(shape)
            miss = Miss(shape, ids, why, record.source, record.seconds)
        self._misses.add(miss)
        _log.warning("%s", miss)
        if miss.outcome == "refused":
            raise CompileMiss(shape, ids, why)

    def pack(self, plan: StepPlan) -> Int32:
        """Builds the input buffer of a plan."""
        layout = self._layouts.get(plan.shape)
        if layout is None:
            layout = self._layouts[plan.shape] = InputLayout.of(plan.shape)
        return pack(plan, layout, self._max_num_seqs)

    def launch(self, shape: StepShape, buffer: Int32) -> jax.Array:
        """Starts the bare program of `shape` on a packed buffer; returns its unread results.

        Raises `MissingExecutable` for a shape that was not built.
        """
        executable = self._executables.get(shape)
        self._state, results = executable(self._weights, self._state, buffer)
        return results

    def collect(self, handle: InFlight) -> StepResult:
        """Waits for the step and reads its tokens back; steps come in dispatch order."""
        if not isinstance(handle, DispatchedStep):
            raise EngineError(f"not a step of this runner: {handle!r}")
        plan = handle.plan
        if not self._dispatched or self._dispatched[0] != plan.step_id:
            raise EngineError(f"step {plan.step_id} collected out of order: {self._dispatched}")
        self._dispatched.popleft()
        try:
            results = np.asarray(handle.results)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceFault(f"step {plan.step_id} failed on the device: {error}") from error
        return unpack_results(plan, results)


def unpack_results(plan: StepPlan, results: np.ndarray) -> StepResult:
    """Spreads `[3, R]` results of the sampled rows over the `B` rows of the plan."""
    sampled = np.flatnonzero(plan.samples)
    token_ids = np.full(plan.num_rows, -1, np.int32)
    logprobs = np.zeros(plan.num_rows, np.float32)
    finite = np.ones(plan.num_rows, np.bool_)
    count = len(sampled)
    token_ids[sampled] = results[0, :count]
    logprobs[sampled] = results[1, :count].view(np.float32)
    finite[sampled] = results[2, :count] != 0
    return StepResult(plan.step_id, token_ids, logprobs, finite)
