"""The compile cache of a serving process: one executable per `StepShape`, built ahead of time.

Owns the executables, the records of how each was had, and the rule that nothing compiles after
`freeze()` unless it is asked for by name. How one executable is found, loaded or compiled is
`buckets.executable`'s part; knows no model and no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from buckets.cache_store import CacheStore
from buckets.executable import ExecutableRecord, ExecutableSource, Programs
from buckets.executable_facts import ExecutableFacts
from buckets.shape import StepShape


class MissingExecutable(KeyError):
    """A shape without an executable was asked for."""


class NotWarm(RuntimeError):
    """Shapes that would have to be compiled where that was forbidden; `reasons` says why each."""

    def __init__(self, reasons: dict[StepShape, str]) -> None:
        lines = (f"({shape}): {reason}" for shape, reason in reasons.items())
        super().__init__(f"{len(reasons)} program(s) are not warm: " + "; ".join(lines))
        self.reasons = reasons


class CompileCache:
    """Executables by shape. Any thread may `get` while another one builds.

    Args:
        programs: what there is to compile.
        store: where executables are kept; None keeps them in memory only.
        require_warm: compile nothing, ever: `build` raises `NotWarm` instead.
        jobs: programs compiled at once.
    """

    def __init__(
        self,
        programs: Programs,
        store: CacheStore | None,
        *,
        require_warm: bool = False,
        jobs: int = 1,
    ) -> None:
        self._source = ExecutableSource(programs, store)
        self._require_warm = require_warm
        self._jobs = jobs
        self._lock = threading.Lock()
        self._executables: dict[StepShape, jax.stages.Compiled] = {}
        self._records: list[ExecutableRecord] = []
        self._released: set[StepShape] = set()
        # None before `freeze`: anything may be built.
        self._planned: frozenset[StepShape] | None = None

    @property
    def compile_count(self) -> int:
        """Programs the compiler built in this process (not those loaded from disk)."""
        return sum(record.source == "compiled" for record in self.records)

    @property
    def load_count(self) -> int:
        return sum(record.source == "loaded" for record in self.records)

    @property
    def records(self) -> tuple[ExecutableRecord, ...]:
        with self._lock:
            return tuple(self._records)

    @property
    def warm_shapes(self) -> frozenset[StepShape]:
        with self._lock:
            return frozenset(self._executables)

    def stored_facts(self, shapes: Iterable[StepShape]) -> dict[StepShape, ExecutableFacts]:
        """What is known of these shapes from the store, without lowering or loading anything."""
        return self._source.stored_facts(shapes)

    def build(self, shapes: Iterable[StepShape]) -> Iterator[ExecutableRecord]:
        """Loads or compiles every shape that has no executable yet, yielding a record for each.

        Raises `MissingExecutable` for a shape nobody planned before `freeze`, and `NotWarm` at
        the end where shapes would have to be compiled and must not.
        """
        wanted = [shape for shape in dict.fromkeys(shapes) if shape not in self.warm_shapes]
        for shape in wanted:
            if self._planned is not None and shape not in self._planned:
                raise MissingExecutable(shape)
        if self._require_warm:
            yield from self._load_all(wanted)
        elif self._jobs == 1:
            yield from map(self._obtain, wanted)
        else:
            with ThreadPoolExecutor(self._jobs, "compile") as pool:
                running = [pool.submit(self._obtain, shape) for shape in wanted]
                try:
                    for done in as_completed(running):
                        yield done.result()
                finally:
                    pool.shutdown(cancel_futures=True)

    def build_missing(self, shape: StepShape) -> ExecutableRecord:
        """Loads or compiles one shape whatever was planned: for a miss that someone pays for."""
        if self._require_warm:
            raise NotWarm({shape: "compiling is forbidden (require_warm)"})
        return self._obtain(shape)

    def plan(self, shapes: Iterable[StepShape]) -> None:
        """Allows `build` to make these shapes too, after `freeze`: a new plan was accepted."""
        if self._planned is not None:
            self._planned = self._planned | frozenset(shapes)

    def freeze(self, planned: Iterable[StepShape] = ()) -> None:
        """From now on `build` makes no shape besides those it has made and the `planned` ones."""
        self._planned = self.warm_shapes | frozenset(planned)

    def get(self, shape: StepShape) -> jax.stages.Compiled:
        """The executable of `shape`; raises `MissingExecutable` when there is none."""
        try:
            return self._executables[shape]
        except KeyError:
            raise MissingExecutable(shape) from None

    def why_missing(self, shape: StepShape) -> str:
        """How it came about that `get` has nothing for `shape`."""
        if shape in self._released:
            return "released: no plan had it any more"
        if self._planned is not None and shape not in self._planned:
            return "not in the plan"
        return "in the plan, but not warm: not built yet, or it failed"

    def release(self, shapes: Iterable[StepShape]) -> None:
        """Lets executables go: their shapes are missing from now on."""
        with self._lock:
            for shape in shapes:
                if self._executables.pop(shape, None) is not None:
                    self._released.add(shape)

    def _obtain(self, shape: StepShape) -> ExecutableRecord:
        return self._keep(shape, *self._source.obtain(shape))

    def _load_all(self, shapes: list[StepShape]) -> Iterator[ExecutableRecord]:
        reasons: dict[StepShape, str] = {}
        for shape in shapes:
            compiled, record = self._source.load(shape)
            if compiled is None:
                reasons[shape] = record.note or "not in the cache"
            else:
                yield self._keep(shape, compiled, record)
        if reasons:
            raise NotWarm(reasons)

    def _keep(
        self, shape: StepShape, compiled: jax.stages.Compiled, record: ExecutableRecord
    ) -> ExecutableRecord:
        with self._lock:
            self._executables[shape] = compiled
            self._released.discard(shape)
            self._records.append(record)
        return record
