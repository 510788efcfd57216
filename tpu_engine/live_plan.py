"""The plan an engine serves with, and its change to another one while it serves.

Owns the rule that one change runs at a time, its course (warm, take over at a step border, release
what no plan has any more) and its status. Executables, step loop and thread are passed in: whoever
calls `run` gives the thread to warm in. Loads no JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from buckets.plan import Plan, PlanLimits
from buckets.shape import StepShape
from buckets.warm_order import warm_order
from tpu_engine.errors import EngineError, InvalidConfig, InvalidRequest
from tpu_engine.plans import read_plan
from tpu_engine.warm_progress import WarmProgress, short_name

# Plans of hundreds of shapes have less; reading much more would hold up the server.
MAX_PLAN_LENGTH = 128 * 1024

Phase = Literal["none", "warming", "taking over", "done", "failed"]


class SwapRefused(EngineError):
    """The plan can't be changed now; says why."""


class Record(Protocol):
    """How one shape got its executable; `buckets.executable.ExecutableRecord` is one."""

    @property
    def shape(self) -> StepShape: ...
    @property
    def source(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def note(self) -> str: ...


class Executables(Protocol):
    """What `buckets.compile_cache.CompileCache` offers here."""

    @property
    def records(self) -> tuple[Record, ...]: ...
    @property
    def warm_shapes(self) -> frozenset[StepShape]: ...
    def plan(self, shapes: Iterable[StepShape]) -> None: ...
    def build(self, shapes: Iterable[StepShape]) -> Iterator[Record]: ...
    def release(self, shapes: Iterable[StepShape]) -> None: ...


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Where the latest change of plan is, or how it ended.

    Attributes:
        what: "partial" (the rest of the plan the engine opened with) or "swap".
        done, total: shapes warmed and to be warmed.
        current: the shape at work.
        seconds_left: until all are warm; None where nothing is known yet.
        error: why it failed.
    """

    phase: Phase = "none"
    what: str = ""
    done: int = 0
    total: int = 0
    current: str = ""
    seconds_left: float | None = None
    error: str = ""


class LivePlan:
    """One engine's plan. Any thread may call; `begin...` and then `run` make one change."""

    def __init__(
        self,
        executables: Executables,
        use_plan: Callable[[Plan], None],
        plan: Plan,
    ) -> None:
        """`use_plan` makes the step loop take a plan, and returns when no older one is in use.

        `plan` is the whole plan, though only a part of it may be warm.
        """
        self.executables = executables
        self._use_plan = use_plan
        self._first = plan
        self._target = plan
        self._limits = PlanLimits(plan.max_num_seqs, plan.max_num_tokens, plan.pages_per_seq)
        self._lock = threading.Lock()
        self._is_changing = False
        self.change = PlanChange()
        # What the scheduler plans with now.
        self.shapes = tuple(s for s in plan.shapes if s in executables.warm_shapes)

    @property
    def is_changing(self) -> bool:
        return self._is_changing

    def begin_rest(self) -> bool:
        """Starts the change to the whole plan the engine was built with; False if it serves it."""
        if self.shapes == self._first.shapes:
            return False
        self._begin(self._first, "partial")
        return True

    def begin_swap(self, plan_yaml: str) -> int:
        """Starts the change to the plan of a plan file's text; returns how many shapes are cold.

        Raises `InvalidRequest` for a plan that can't be served, `SwapRefused` while another
        change is running.
        """
        if len(plan_yaml) > MAX_PLAN_LENGTH:
            limit = f"at most {MAX_PLAN_LENGTH} characters"
            raise InvalidRequest("plan_yaml", limit, f"{len(plan_yaml)} characters")
        try:
            plan = read_plan(plan_yaml, self._limits, "the plan sent")
        except InvalidConfig as error:
            raise InvalidRequest("plan_yaml", error.limit, error.given) from None
        for shape in plan.shapes:
            options = dict(self._first.compiler_options(shape))
            if dict(plan.compiler_options(shape)) != options:
                limit = f"with the compiler_options of the plan at start, {options}; start anew"
                given = f"{dict(plan.compiler_options(shape))} for ({shape})"
                raise InvalidRequest("plan_yaml", limit, given)
        self._begin(plan, "swap")
        return len(frozenset(plan.shapes) - self.executables.warm_shapes)

    def run(self) -> None:
        """Warms and takes over what was begun; what it raises must be given to `end`."""
        plan, what = self._target, self.change.what
        warm = self.executables.warm_shapes
        wanted = [shape for shape in warm_order(plan) if shape not in warm]
        progress = WarmProgress(wanted)
        self._report("warming", progress)
        self.executables.plan(wanted)
        for record in self.executables.build(wanted):
            progress.note(record.shape, record.source, record.seconds)
            self._report("warming", progress)
            if what == "partial" and progress.current is not None:
                self._take(Plan.of((*self.shapes, record.shape)))
        self._report("taking over", progress)
        self._take(plan)
        self.executables.release(self.executables.warm_shapes - frozenset(plan.shapes))
        self._report("done", progress)

    def end(self, error: BaseException | None) -> None:
        """Ends the change; after an error the plan that is in use stays, and nothing else."""
        with self._lock:
            if error is not None:
                change = self.change
                text = f"{type(error).__name__}: {error}"
                self.change = PlanChange(
                    "failed", change.what, change.done, change.total, error=text
                )
                self.executables.release(self.executables.warm_shapes - frozenset(self.shapes))
            self._is_changing = False

    def _begin(self, plan: Plan, what: str) -> None:
        with self._lock:
            if self._is_changing:
                change = self.change
                raise SwapRefused(
                    f"another change of plan is running ({change.what}, {change.phase} "
                    f"{change.done}/{change.total}); try again when it has ended"
                )
            self._is_changing = True
            self._target = plan
            self.change = PlanChange("warming", what)

    def _take(self, plan: Plan) -> None:
        self._use_plan(plan)
        self.shapes = plan.shapes

    def _report(self, phase: Phase, progress: WarmProgress) -> None:
        self.change = PlanChange(
            phase,
            self.change.what,
            progress.done,
            progress.total,
            short_name(progress.current),
            progress.seconds_left,
        )
