"""`StepThread`: the thread that owns an `EngineLoop`.

Owns the inbox, the set of open requests and the end of the thread: whatever happens, every
request that was submitted gets exactly one `Refused` or final `RequestOutput`. Doesn't know text,
streams or transports; the clock is passed in.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from buckets.plan import Plan
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.errors import EngineError, Overloaded
from tpu_engine.messages import (
    End,
    EngineStatus,
    Inbound,
    Outbound,
    Refused,
    RequestOutput,
    Submit,
    UsePlan,
)
from tpu_engine.request import Finish, FinishReason, Request

RETRY_S = 0.05
"""How long a turn is put off when there is work but no step could be planned."""


class NotServing(EngineError):
    """The step thread takes no new requests: it drains, was stopped, or has failed."""


class StepThread:
    """Runs turns while there is work, and sleeps on its inbox while there is none.

    `on_outputs` is called in the step thread, once per turn that has outputs; it must be quick.
    `on_fault` is called in the step thread if an exception ends it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        clock: Callable[[], float],
        on_outputs: Callable[[list[Outbound]], None],
        on_fault: Callable[[Exception], None],
        max_inbox: int = 4096,
    ) -> None:
        """`max_inbox` bounds the messages that wait for the next turn."""
        self._loop = loop
        self._clock = clock
        self._on_outputs = on_outputs
        self._on_fault = on_fault
        self._max_inbox = max_inbox
        self._inbox: queue.SimpleQueue[Inbound | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._open: set[int] = set()
        self._closed = ""
        self._stopping = False
        self._is_ended = False
        self._status = loop.status()
        self._settled_plan: Plan | None = None
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hands over a request; raises `Overloaded` (inbox full) or `NotServing`.

        An id must not be submitted twice.
        """
        with self._lock:
            if self._closed:
                raise NotServing(f"no new requests: {self._closed}")
            waiting = self._inbox.qsize()
            if waiting >= self._max_inbox:
                raise Overloaded("messages to the step loop", self._max_inbox, waiting + 1, 1.0)
            self._open.add(request.request_id)
            self._inbox.put(Submit(request))

    def end(self, request_id: int, finish: Finish) -> None:
        """Asks for the end of a request; never refused, and ignored if it is not open."""
        with self._lock:
            if request_id in self._open:
                self._inbox.put(End(request_id, finish))

    def use_plan(self, plan: Plan) -> None:
        """Changes the plan at a step border; returns once no step of an older one is in flight.

        The plan must have the budgets of the one before it. Raises `NotServing` where the thread
        ends first. One caller at a time.
        """
        with self._lock:
            if not self._is_ended:
                self._inbox.put(UsePlan(plan))
            self._lock.wait_for(lambda: self._settled_plan is plan or self._is_ended)
            if self._settled_plan is not plan:
                raise NotServing(f"the plan was not changed: {self._closed}")

    def status(self) -> EngineStatus:
        """The status after the last turn."""
        return self._status

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        with self._lock:
            return len(self._open)

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for the open ones; False if some are left."""
        self._close("draining")
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, timeout_s)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends every open request as aborted and the thread with them; False if it is stuck."""
        self._close("stopped")
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the step thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(self._receive())
            self._wind_down()
        except Exception as error:  # noqa: BLE001  the top of a thread
            self._fail(error)
        finally:
            with self._lock:
                self._is_ended = True
                self._lock.notify_all()

    def _turn(self, messages: list[Inbound]) -> None:
        outputs = self._loop.turn(messages, self._clock)
        self._status = self._loop.status()
        self._note_plan()
        self._publish(outputs)

    def _receive(self) -> list[Inbound]:
        """All messages there are; waits for one only if a turn without any would be idle."""
        messages: list[Inbound] = []
        has_work = self._loop.has_work
        try:
            if has_work and self._loop.progressed:
                first = self._inbox.get_nowait()
            else:
                first = self._inbox.get(timeout=RETRY_S if has_work else None)
            while first is not None:
                messages.append(first)
                first = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return messages

    def _wind_down(self) -> None:
        """Takes in what is left, ends it all, and reads back what is still in flight."""
        finish = Finish(FinishReason.ABORTED, "engine stopped")
        left = self._receive_rest()
        with self._lock:
            ends = [End(request_id, finish) for request_id in sorted(self._open)]
        self._turn([*left, *ends])
        while self._loop.has_work:
            self._turn([])

    def _receive_rest(self) -> list[Inbound]:
        messages: list[Inbound] = []
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None:
                messages.append(message)
        return messages

    def _note_plan(self) -> None:
        settled = self._loop.settled_plan
        if settled is not self._settled_plan:
            with self._lock:
                self._settled_plan = settled
                self._lock.notify_all()

    def _publish(self, outputs: list[Outbound]) -> None:
        if not outputs:
            return
        self._on_outputs(outputs)
        ended = {o.request_id for o in outputs if isinstance(o, Refused) or o.finish is not None}
        with self._lock:
            self._open -= ended
            if not self._open:
                self._lock.notify_all()

    def _fail(self, error: Exception) -> None:
        """Reports the fault and ends whatever is open; the engine's own state is not trusted."""
        self._close("the step loop failed")
        finish = Finish(FinishReason.ERROR, f"the step loop failed: {error}")
        now = self._clock()
        with self._lock:
            left = sorted(self._open)
            self._open.clear()
            self._lock.notify_all()
        try:
            self._on_fault(error)
        finally:
            self._on_outputs([RequestOutput(i, (), (), now, None, 0, finish) for i in left])

    def _close(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or why
