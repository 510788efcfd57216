"""Finding stop strings in text that arrives in pieces.

Owns the text held back because it may still become a stop string. Doesn't know tokens or
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be given out now, and the stop string that ended the answer, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Watches one answer for any of `stops`.

    The stop string that is complete first wins; of several that end at the same character, the
    longest. So the result doesn't depend on how the text was cut into pieces. Nothing of a
    matched stop string is given out, unless `include_stop_in_output`: then it is the last thing.
    After a match whatever follows is discarded.
    """

    def __init__(self, stops: Sequence[str], include_stop_in_output: bool = False) -> None:
        for place, stop in enumerate(stops):
            if not stop:
                raise InvalidRequest(f"stop[{place}]", "a non-empty string", stop)
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include_stop_in_output
        self._held = ""
        self._is_done = False

    def feed(self, delta: str) -> StopResult:
        """Takes the next piece of text and returns what is certain by now."""
        if self._is_done:
            return StopResult("")
        text = self._held + delta
        if match := self._first_match(text):
            self._is_done, self._held = True, ""
            end, stop = match
            return StopResult(text[: end if self._include else end - len(stop)], stop)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return StopResult(text[:cut])

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the first complete stop string ends, and which it is."""
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        return min(ends, key=lambda found: found[0], default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of the whole `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
