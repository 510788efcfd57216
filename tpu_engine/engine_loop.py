"""`EngineLoop`: one turn after another: messages in, a step planned and dispatched, tokens out.

Owns the order of things between scheduler and runner (with overlap, step N+1 is dispatched before
step N is read back), the totals and the records of steps. Doesn't know threads, clocks (`now` is
an argument or a callable that is passed in), text, or what a runner does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from buckets.cost import CostModel
from buckets.plan import Plan
from buckets.shape import StepShape
from tpu_engine.errors import CompileMiss, DeviceFault, InvalidRequest, Overloaded
from tpu_engine.messages import (
    End,
    EngineStatus,
    Inbound,
    Outbound,
    Refused,
    ShapeUse,
    Submit,
    UsePlan,
)
from tpu_engine.request import Finish, FinishReason
from tpu_engine.scheduler import Scheduler
from tpu_engine.step_plan import InFlight, Runner, StepPlan

MAX_STEP_RECORDS = 512


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was: `rows` are `(request, epoch, start, num_tokens)`, times are in seconds.

    `fault` says why the step gave no result ("" if it did). Of steps that overlap, `added_s` is
    what this one adds to the one before it; `predicted_s` is that as the cost model saw it coming.
    """

    step_id: int
    shape: StepShape
    rows: tuple[tuple[int, int, int, int], ...]
    useful_tokens: int
    executed_tokens: int
    planned_s: float
    collected_s: float
    added_s: float
    predicted_s: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A step between its plan and its result; `handle` is None where dispatching failed."""

    plan: StepPlan
    planned_s: float
    predicted_s: float
    handle: InFlight | None
    fault: str = ""


class EngineLoop:
    """Runs one scheduler on one runner; every call must come from the same thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        overlap: bool = True,
        compile_count: Callable[[], int] = lambda: 0,
        cost: CostModel | None = None,
    ) -> None:
        """`compile_count` tells how many programs were compiled so far; `cost` learns of steps."""
        self.cost = CostModel() if cost is None else cost
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._compile_count = compile_count
        self._pending: deque[_Dispatched] = deque()
        self._num_steps = 0
        self._useful_tokens = 0
        self._executed_tokens = 0
        self._progressed = False
        self._uses: dict[StepShape, ShapeUse] = {}
        self._last_end_s = float("-inf")
        # The plan that was set last, and how many steps in flight were planned before that.
        self._plan: Plan | None = None
        self._num_older = 0
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)

    @property
    def has_work(self) -> bool:
        """Whether a turn without messages could still have something to do."""
        return self._scheduler.has_work or bool(self._pending)

    @property
    def progressed(self) -> bool:
        """Whether the last turn dispatched or collected a step; if not, waiting is no loss."""
        return self._progressed

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Requests that were accepted and have not ended."""
        return self._scheduler.live_ids

    @property
    def settled_plan(self) -> Plan | None:
        """The plan that was set last, once no step in flight was planned before it."""
        return None if self._num_older else self._plan

    def use_plan(self, message: UsePlan) -> None:
        """Takes another plan for the steps to come; raises `InvalidPlan` for other budgets."""
        self._scheduler.set_plan(message.plan)
        self._plan, self._num_older = message.plan, len(self._pending)

    def submit(self, message: Submit, now: float) -> list[Outbound]:
        """Takes a request in; `[]`, or its refusal."""
        request = message.request
        try:
            self._scheduler.add(request, now)
        except (InvalidRequest, Overloaded) as error:
            return [Refused(request.request_id, error)]
        return []

    def end(self, message: End, now: float) -> list[Outbound]:
        """Ends a request now; `[]` if it is unknown or has ended."""
        return [*self._scheduler.end(message.request_id, message.finish, now)]

    def turn(self, messages: Iterable[Inbound], now: float | Callable[[], float]) -> list[Outbound]:
        """Applies `messages`, dispatches the next step, and collects the one that is due.

        Without overlap the step is collected in the same turn. `now` is the time, or a callable
        that tells it (then ends of steps carry the later time).
        """
        clock = now if callable(now) else lambda: now
        start_s = clock()
        outputs: list[Outbound] = []
        for message in messages:
            if isinstance(message, Submit):
                outputs += self.submit(message, start_s)
            elif isinstance(message, UsePlan):
                self.use_plan(message)
            else:
                outputs += self.end(message, start_s)
        outputs += self._scheduler.expire(start_s)
        plan = self._scheduler.schedule(start_s)
        outputs += self._scheduler.take_ended()
        num_kept = 0
        if plan is not None:
            step = self._dispatch(plan, start_s)
            self._pending.append(step)
            # Nothing may be planned on top of a step that never reached the device.
            num_kept = 1 if self._overlap and step.handle is not None else 0
        self._progressed = plan is not None or len(self._pending) > num_kept
        while len(self._pending) > num_kept:
            outputs += self._collect(self._pending.popleft(), clock)
        return outputs

    def status(self) -> EngineStatus:
        gauges = self._scheduler.snapshot()
        return EngineStatus(
            running=gauges.running,
            waiting=gauges.waiting,
            free_pages=gauges.free_pages,
            total_pages=gauges.total_pages,
            steps=self._num_steps,
            useful_tokens=self._useful_tokens,
            executed_tokens=self._executed_tokens,
            watermark=gauges.watermark.value,
            compile_count=self._compile_count(),
            preemptions=gauges.preemptions,
            shapes=tuple(self._uses.values()),
        )

    def _dispatch(self, plan: StepPlan, now: float) -> _Dispatched:
        predicted_s = self.cost.predict(plan.shape, plan.work)
        try:
            return _Dispatched(plan, now, predicted_s, self._runner.dispatch(plan))
        except (DeviceFault, CompileMiss) as error:
            fault = str(error) or type(error).__name__
            return _Dispatched(plan, now, predicted_s, None, fault)

    def _collect(self, step: _Dispatched, clock: Callable[[], float]) -> list[Outbound]:
        """Reads a step back; a fault ends the requests that were in it and nobody else."""
        fault = step.fault
        outputs: list[Outbound] = []
        collected_s = step.planned_s
        if step.handle is not None:
            try:
                result = self._runner.collect(step.handle)
                collected_s = clock()
                outputs += self._scheduler.update(step.plan, result, collected_s)
            except DeviceFault as error:
                fault = str(error) or type(error).__name__
        if fault:
            collected_s = clock()
            finish = Finish(FinishReason.ERROR, fault)
            outputs += self._scheduler.abandon(step.plan, finish, collected_s)
        self._record(step, collected_s, fault)
        return outputs

    def _record(self, step: _Dispatched, collected_s: float, fault: str) -> None:
        plan = step.plan
        self._num_steps += 1
        self._useful_tokens += plan.num_useful_tokens
        self._executed_tokens += plan.num_executed_tokens
        self._num_older = max(0, self._num_older - 1)
        added_s = max(0.0, collected_s - max(step.planned_s, self._last_end_s))
        self._last_end_s = collected_s
        self._count_use(plan, added_s)
        if not fault:
            self.cost.observe(plan.shape, plan.work, added_s)
        self.records.append(
            StepRecord(
                step_id=plan.step_id,
                shape=plan.shape,
                rows=tuple(plan.rows()),
                useful_tokens=plan.num_useful_tokens,
                executed_tokens=plan.num_executed_tokens,
                planned_s=step.planned_s,
                collected_s=collected_s,
                added_s=added_s,
                predicted_s=step.predicted_s,
                fault=fault,
            )
        )

    def _count_use(self, plan: StepPlan, added_s: float) -> None:
        use = self._uses.get(plan.shape) or ShapeUse(plan.shape)
        self._uses[plan.shape] = ShapeUse(
            plan.shape,
            use.steps + 1,
            use.useful_tokens + plan.num_useful_tokens,
            use.executed_tokens + plan.num_executed_tokens,
            use.seconds + added_s,
        )
