import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fake_engine import FakeEngine, request
from tests.fake_runner import FakeRunner, expected_tokens
from tpu_engine.errors import InvalidRequest, Overloaded
from tpu_engine.messages import Outbound, Refused
from tpu_engine.request import Finish, FinishReason
from tpu_engine.step_plan import InFlight, StepResult
from tpu_engine.step_thread import NotServing, StepThread

CANCEL = Finish(FinishReason.CANCELLED)


class Slow(FakeRunner):
    """Waits at collect until `gate` is set; fails with `error` once that is set."""

    def __init__(self) -> None:
        super().__init__(200, 4, 4)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def collect(self, handle: InFlight) -> StepResult:
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().collect(handle)


class Front:
    """What a server would be: it keeps what the step thread says."""

    def __init__(self, max_inbox: int = 100) -> None:
        self.runner = Slow()
        engine = FakeEngine(runner=self.runner)
        self.engine = engine
        self.outputs: list[Outbound] = []
        self.faults: list[Exception] = []
        self.failing = False
        self.turns = 0
        self.thread = StepThread(
            engine.loop, self.clock, self.take, self.faults.append, max_inbox=max_inbox
        )

    def clock(self) -> float:
        self.turns += 1
        return time.monotonic()

    def take(self, outputs: list[Outbound]) -> None:
        if self.failing:
            self.failing = False
            raise ValueError("the front broke")
        self.outputs += outputs

    def tokens(self, request_id: int) -> list[int]:
        mine = [o for o in self.outputs if o.request_id == request_id]
        return [t for o in mine if not isinstance(o, Refused) for t in o.token_ids]

    def finishes(self) -> dict[int, Finish]:
        done = [(o.request_id, o.finish) for o in self.outputs if not isinstance(o, Refused)]
        ends = [(i, finish) for i, finish in done if finish is not None]
        assert len(dict(ends)) == len(ends), "two final outputs"
        return dict(ends)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    front.thread.start()
    yield front
    front.runner.gate.set()
    assert front.thread.stop()


def wait_for(condition: Callable[[], object], front: Front) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, front.outputs
        time.sleep(0.002)


def test_serves_requests_from_several_threads(front: Front):
    def client(first: int) -> None:
        for i in range(first, first + 8):
            front.thread.submit(request(i))

    clients = [threading.Thread(target=client, args=(first,)) for first in (0, 8, 16)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert front.thread.drain(20)
    assert len(front.finishes()) == 24
    for i in range(24):
        assert front.tokens(i) == expected_tokens(request(i))
    status = front.thread.status()
    assert (status.running, status.free_pages) == (0, status.total_pages)


def test_an_idle_thread_sleeps(front: Front):
    front.thread.submit(request(1))
    wait_for(lambda: front.thread.num_open == 0, front)
    time.sleep(0.05)
    turns = front.turns
    time.sleep(0.3)
    assert front.turns == turns
    front.thread.submit(request(2))
    wait_for(lambda: front.thread.num_open == 0, front)
    assert front.tokens(2) == expected_tokens(request(2))


def test_end_stops_a_request_and_is_ignored_for_others(front: Front):
    front.runner.gate.clear()
    front.thread.submit(request(1, 8, 100))
    front.thread.end(1, CANCEL)
    front.thread.end(77, CANCEL)
    front.runner.gate.set()
    wait_for(lambda: front.thread.num_open == 0, front)
    front.thread.end(1, CANCEL)
    assert front.finishes() == {1: CANCEL}


def test_refusals_close_the_request(front: Front):
    front.thread.submit(request(1, 300, 1))
    wait_for(lambda: front.thread.num_open == 0, front)
    (refused,) = front.outputs
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidRequest)


def test_the_inbox_is_bounded_but_takes_every_end():
    front = Front(max_inbox=3)
    for i in range(3):
        front.thread.submit(request(i))
    with pytest.raises(Overloaded, match="limited to 3"):
        front.thread.submit(request(3))
    for i in range(3):
        front.thread.end(i, CANCEL)
    front.thread.start()
    assert front.thread.drain(20)
    assert front.finishes() == dict.fromkeys(range(3), CANCEL)
    assert front.thread.stop()


def test_drain_finishes_what_runs_and_refuses_the_rest(front: Front):
    front.runner.gate.clear()
    front.thread.submit(request(1, 8, 50))
    assert not front.thread.drain(0.01)
    with pytest.raises(NotServing, match="draining"):
        front.thread.submit(request(2))
    front.runner.gate.set()
    assert front.thread.drain(20)
    assert front.tokens(1) == expected_tokens(request(1, 8, 50))


def test_stop_ends_what_is_open_and_gives_the_pages_back():
    front = Front()
    front.thread.start()
    front.runner.gate.clear()
    for i in range(6):
        front.thread.submit(request(i, 8, 100))
    threading.Timer(0.05, front.runner.gate.set).start()
    assert front.thread.stop()
    assert front.finishes() == {i: Finish(FinishReason.ABORTED, "engine stopped") for i in range(6)}
    assert front.engine.pool.num_free == front.engine.pool.num_usable
    with pytest.raises(NotServing, match="stopped"):
        front.thread.submit(request(9))
    assert front.thread.stop()


def test_a_bug_in_a_turn_is_reported_and_ends_everything_open():
    front = Front()
    front.runner.error = KeyError("a bug")
    front.thread.submit(request(1))
    front.thread.submit(request(2))
    front.thread.start()
    wait_for(lambda: front.faults, front)
    wait_for(lambda: len(front.outputs) == 2, front)
    assert isinstance(front.faults[0], KeyError)
    for finish in front.finishes().values():
        assert finish == Finish(FinishReason.ERROR, "the step loop failed: 'a bug'")
    assert front.thread.drain(1)
    with pytest.raises(NotServing, match="failed"):
        front.thread.submit(request(3))
    assert front.thread.stop()


def test_a_front_that_raises_ends_the_thread_in_the_open():
    front = Front()
    front.failing = True
    front.thread.submit(request(1))
    front.thread.start()
    wait_for(lambda: front.faults, front)
    wait_for(lambda: front.outputs, front)
    assert front.finishes()[1].reason is FinishReason.ERROR
    assert front.thread.stop()
