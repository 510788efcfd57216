"""Compile misses: steps that asked for a shape without an executable, and what became of them.

Owns their count and the latest of them. Doesn't know how a shape is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buckets.shape import StepShape

MAX_RECENT = 16

Outcome = Literal["refused", "compiled", "loaded"]


@dataclass(frozen=True, slots=True)
class Miss:
    """One step that had no executable.

    Attributes:
        why: how a shape without an executable came to be asked for.
        outcome: "refused" (its requests ended), or how the executable was had after all.
        seconds: that the step loop stood still for it.
    """

    shape: StepShape
    request_ids: tuple[int, ...]
    why: str
    outcome: Outcome
    seconds: float

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.request_ids))
        ended = f"{self.outcome} in {self.seconds:.2f} s"
        if self.outcome == "refused":
            ended = "refused (on_miss)"
        return f"compile miss: ({self.shape}), {self.why}, for requests {ids}: {ended}"


class MissLog:
    """Written by the step thread, read by any."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.recent: tuple[Miss, ...] = ()

    def add(self, miss: Miss) -> None:
        self.count += 1
        self.seconds += miss.seconds
        self.recent = (*self.recent[1 - MAX_RECENT :], miss)
