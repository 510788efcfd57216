"""The open streams: where the step loop's outputs wait for the coroutine that sends them.

Owns the table from request id to stream. It belongs to the event loop: the step thread reaches it
only through `deliver_soon`. Outputs of a slow reader pile up in its own stream, at most
`max_tokens` of them, so memory is bounded by `max_open`. Knows no gRPC and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tpu_engine.errors import Overloaded
from tpu_engine.messages import Refused, RequestOutput

RETRY_AFTER_S = 1.0


class Stream:
    """What one request still has to send; one reader."""

    def __init__(self) -> None:
        self._pending: list[RequestOutput | Refused] = []
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput | Refused) -> None:
        """Adds an output and wakes the reader."""
        self._pending.append(output)
        self._arrived.set()

    async def take(self) -> list[RequestOutput | Refused]:
        """Everything that arrived since the last call; waits for the first."""
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pending = self._pending, []
        return taken


class Streams:
    """All open streams of one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_open: int) -> None:
        self._loop = loop
        self._max_open = max_open
        self._reserved = 0
        self._streams: dict[int, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._reserved

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._streams

    @property
    def request_ids(self) -> tuple[int, ...]:
        return tuple(self._streams)

    def reserve(self) -> None:
        """Counts one more stream before any work is done for it.

        Raises `Overloaded` when `max_open` are open; every success needs one `release`.
        """
        if self._reserved >= self._max_open:
            raise Overloaded("open streams", self._max_open, self._reserved + 1, RETRY_AFTER_S)
        self._reserved += 1
        self._idle.clear()

    def release(self) -> None:
        """Gives back what `reserve` took."""
        self._reserved -= 1
        if self._reserved == 0:
            self._idle.set()

    def open(self, request_id: int) -> Stream:
        """The stream that outputs of `request_id` go to from now on."""
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: int) -> None:
        """Outputs of `request_id` that still come are dropped."""
        del self._streams[request_id]

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no stream is open; False where that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def deliver(self, outputs: Sequence[RequestOutput | Refused]) -> None:
        """Hands outputs to their streams; to be called in the event loop."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def deliver_soon(self, outputs: Sequence[RequestOutput | Refused]) -> None:
        """Like `deliver`, from any thread; outputs of a loop that is closed are dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.deliver, outputs)
