"""An engine without a server: asks in, pieces of output out, all in the caller's thread.

Owns the driving of the step loop for `generate`, `chat` and `batch`. Knows no files, no terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Generic, TypeVar

from tpu_engine.engine_loop import EngineLoop
from tpu_engine.errors import InvalidRequest, Overloaded
from tpu_engine.front import Ask, Intake
from tpu_engine.front_output import OutputAssembler, Piece
from tpu_engine.messages import End, Inbound, Outbound, Refused, Submit
from tpu_engine.request import Finish, FinishReason

Key = TypeVar("Key")
Refusal = InvalidRequest | Overloaded

LEFT = Finish(FinishReason.CANCELLED, detail="the caller stopped reading")


class OfflineEngine(Generic[Key]):
    """Serves asks at full speed; `max_open` of them are in the engine at once."""

    def __init__(
        self,
        loop: EngineLoop,
        intake: Intake,
        max_open: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._intake = intake
        self._max_open = max_open
        self._clock = clock
        self._open: dict[int, tuple[Key, OutputAssembler]] = {}

    def run(self, asks: Iterable[tuple[Key, Ask]]) -> Generator[tuple[Key, Piece | Refusal]]:
        """Yields the pieces of all asks as they come, each with its ask's key.

        Asks are taken one by one as places become free. An ask that can't be served yields its
        refusal. Closing the iterator early ends what is still open. An exception out of a step
        (Ctrl-C included) leaves the engine torn: throw it away.
        """
        waiting = iter(asks)
        messages: list[Inbound] = []
        is_exhausted = is_torn = False
        try:
            while True:
                while not is_exhausted and len(self._open) < self._max_open:
                    entry = next(waiting, None)
                    if entry is None:
                        is_exhausted = True
                        break
                    refusal = self._submit(*entry, messages)
                    if refusal is not None:
                        yield entry[0], refusal
                if is_exhausted and not self._open and not messages:
                    return
                is_torn = True
                outputs = self._loop.turn(messages, self._clock)
                is_torn = False
                messages = []
                for output in outputs:
                    found = self._take(output, messages)
                    if found is not None:
                        yield found
        finally:
            if not is_torn:
                self._abandon()

    def _submit(self, key: Key, ask: Ask, messages: list[Inbound]) -> Refusal | None:
        try:
            admitted = self._intake.admit(ask, self._clock())
        except InvalidRequest as error:
            return error
        self._open[admitted.request.request_id] = key, admitted.assembler
        messages.append(Submit(admitted.request))
        return None

    def _take(
        self, output: Outbound, messages: list[Inbound]
    ) -> tuple[Key, Piece | Refusal] | None:
        entry = self._open.get(output.request_id)
        if entry is None:
            return None
        key, assembler = entry
        if isinstance(output, Refused):
            del self._open[output.request_id]
            return key, output.error
        piece = assembler.feed(output)
        if piece.end is not None:
            messages.append(piece.end)
        if piece.completion is not None:
            del self._open[output.request_id]
        return key, piece

    def _abandon(self) -> None:
        """Ends what is open and lets the loop run dry, so that every page is free again."""
        ends = [End(request_id, LEFT) for request_id in self._loop.live_ids]
        self._open.clear()
        self._loop.turn(ends, self._clock)
        while self._loop.has_work:
            self._loop.turn((), self._clock)
