"""The table of open streams: bounded, woken from any thread, nothing for strangers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.streams import Streams
from tpu_engine.errors import Overloaded
from tpu_engine.messages import RequestOutput


def output(request_id: int, token_id: int) -> RequestOutput:
    return RequestOutput(request_id, (token_id,), (0.0,), 0.0, 0.0, 1)


async def test_places_are_bounded_and_come_back() -> None:
    streams = Streams(asyncio.get_running_loop(), max_open=2)
    streams.reserve()
    streams.reserve()
    with pytest.raises(Overloaded, match="open streams is limited to 2") as caught:
        streams.reserve()
    assert caught.value.retry_after_s > 0
    streams.release()
    streams.reserve()
    assert len(streams) == 2
    assert not await streams.wait_idle(0.01)
    streams.release()
    streams.release()
    assert await streams.wait_idle(0.01)


async def test_outputs_from_a_thread_reach_their_stream_in_order() -> None:
    streams = Streams(asyncio.get_running_loop(), max_open=2)
    first, second = streams.open(1), streams.open(2)

    def produce() -> None:
        for token_id in range(100):
            streams.deliver_soon([output(1, token_id), output(2, -token_id), output(3, 0)])

    thread = threading.Thread(target=produce)
    thread.start()
    for stream, sign in ((first, 1), (second, -1)):
        taken: list[int] = []
        while len(taken) < 100:
            taken += [o.token_ids[0] for o in await stream.take() if isinstance(o, RequestOutput)]
        assert taken == [sign * token_id for token_id in range(100)]
    thread.join()


async def test_outputs_of_a_closed_stream_are_dropped() -> None:
    streams = Streams(asyncio.get_running_loop(), max_open=1)
    stream = streams.open(1)
    assert 1 in streams
    streams.close(1)
    streams.deliver([output(1, 5)])
    assert 1 not in streams
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.take(), 0.01)


def test_a_loop_that_is_gone_does_not_stop_the_step_thread() -> None:
    loop = asyncio.new_event_loop()
    streams = Streams(loop, max_open=1)
    loop.close()
    streams.deliver_soon([output(1, 5)])
