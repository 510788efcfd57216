"""Counts what JAX itself says of its compiler in this process, whoever called it.

Owns the names of the events. They are the proof that a warm start and a frozen cache compile
nothing: our own counters only know of what we compile knowingly.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import jax

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class CompilerEvents:
    """Counts what JAX reports of its compiler while it is open."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> CompilerEvents:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    @property
    def compiled(self) -> int:
        return self.counts[BACKEND_COMPILE]

    @property
    def lowered(self) -> int:
        return self.counts[LOWERING]

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.counts[event] += 1
