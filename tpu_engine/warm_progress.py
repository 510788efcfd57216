"""How far the warming of a plan's shapes is, and how long the rest will take.

Owns that estimate. Pure: what happened is told to it, in seconds. Doesn't know how shapes are
built.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from buckets.shape import StepShape

# Whether the next shape is loaded or compiled is guessed from the last few.
_RECENT = 4


class WarmProgress:
    """Shapes that are warmed one after another, in the order of `shapes`."""

    def __init__(self, shapes: Sequence[StepShape]) -> None:
        self._left = list(dict.fromkeys(shapes))
        self.total = len(self._left)
        self._seen: list[tuple[str, float]] = []

    @property
    def done(self) -> int:
        return len(self._seen)

    @property
    def current(self) -> StepShape | None:
        """The shape that is being warmed; None when all are."""
        return self._left[0] if self._left else None

    def note(self, shape: StepShape, source: str, seconds: float) -> None:
        """Takes note that `shape` was "loaded" or "compiled" in so many seconds."""
        self._left.remove(shape)
        self._seen.append((source, seconds))

    @property
    def seconds_left(self) -> float | None:
        """Estimate for the shapes that are left; None while nothing was seen.

        The median of each source's times, weighted by what the last few shapes were: one slow
        shape doesn't spoil it, and a cache that covers only some shapes shows soon.
        """
        if not self._left:
            return 0.0
        if not self._seen:
            return None
        recent = [source for source, _ in self._seen[-_RECENT:]]
        each_s = 0.0
        for source in set(recent):
            median_s = statistics.median(s for seen, s in self._seen if seen == source)
            each_s += median_s * recent.count(source) / len(recent)
        return each_s * len(self._left)


def short_name(shape: StepShape | None) -> str:
    """A shape in few words: the shapes of one plan differ in tokens and sequences; "" for None."""
    if shape is None:
        return ""
    variant = "" if shape.variant == "full" else f" {shape.variant}"
    return f"tokens={shape.num_tokens} seqs={shape.num_seqs}{variant}"
