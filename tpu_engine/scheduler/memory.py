"""When KV memory is short: how short it is, and which sequence gives its pages back.

Pure functions; they own the policy and know neither the pool nor how a sequence is parked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tpu_engine.scheduler.slots import SlotTable
from tpu_engine.step_plan import Bool


class Watermark(StrEnum):
    """How full the page pool is."""

    NORMAL = "normal"
    PRESSURE = "pressure"
    CRITICAL = "critical"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class WatermarkLevels:
    """Shares of free pages below which the pool is under pressure, and critical."""

    pressure: float = 0.25
    critical: float = 0.10

    def of(self, num_free: int, num_usable: int) -> Watermark:
        """The watermark of a pool with `num_free` of `num_usable` pages free."""
        if num_free == 0:
            return Watermark.EXHAUSTED
        if num_free < self.critical * num_usable:
            return Watermark.CRITICAL
        if num_free < self.pressure * num_usable:
            return Watermark.PRESSURE
        return Watermark.NORMAL


def least_progress(table: SlotTable, candidates: Bool) -> int:
    """The slot of `candidates` that loses the fewest computed tokens; of equals, the newest."""
    slots = np.flatnonzero(candidates)
    order = np.lexsort((-table.epoch[slots], table.planned[slots]))
    return int(slots[order[0]])
