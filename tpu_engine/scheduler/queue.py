"""`WaitingQueue`: sequences without a slot, in the order in which they will get one.

Owns two lines: sequences that were preempted go first, oldest arrival first, then new ones in
arrival order. Both can be left from the middle. Knows nothing of slots and pages.
"""

from __future__ import annotations

from tpu_engine.scheduler.sequence import Sequence


class WaitingQueue:
    """First in, first out; nobody overtakes, so nobody waits for ever."""

    def __init__(self) -> None:
        self._parked: list[Sequence] = []
        self._new: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._parked) + len(self._new)

    @property
    def head_is_parked(self) -> bool:
        return bool(self._parked)

    def add(self, sequence: Sequence) -> None:
        self._new[sequence.request.request_id] = sequence

    def park(self, sequence: Sequence) -> None:
        """Puts a preempted sequence back, before every new one."""
        self._parked.append(sequence)
        self._parked.sort(key=lambda s: (s.request.arrival_s, s.request.request_id))

    def head(self) -> Sequence | None:
        if self._parked:
            return self._parked[0]
        return next(iter(self._new.values()), None)

    def remove(self, sequence: Sequence) -> None:
        """Takes out `sequence`, which must be waiting."""
        if self._new.pop(sequence.request.request_id, None) is None:
            self._parked.remove(sequence)
