"""Programs and openers for tests of the warm-up: they travel to worker processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from buckets.cache_store import CacheStore
from buckets.shape import StepShape
from tests.small_programs import SmallPrograms

FAILS = StepShape(100, 1, 1, 1)
ENDS_THE_PROCESS = StepShape(101, 1, 1, 1)


class WarmPrograms(SmallPrograms):
    """Some shapes fail as compilers do; `slow_s` makes the others take their time."""

    slow_s: float = 0.0

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        if shape == FAILS:
            raise ValueError("this one can't be lowered")
        if shape == ENDS_THE_PROCESS:
            os.write(2, b"F1201 compiler: check failed\n")
            os._exit(7)
        time.sleep(self.slow_s)
        return super().lower(shape)


@dataclass(frozen=True)
class Opening:
    """What a worker calls."""

    directory: Path
    slow_s: float = 0.0

    def __call__(self) -> tuple[WarmPrograms, CacheStore]:
        programs = WarmPrograms()
        programs.slow_s = self.slow_s
        return programs, CacheStore(self.directory)


def no_opening() -> tuple[WarmPrograms, CacheStore]:
    raise RuntimeError("there is no such folder")
