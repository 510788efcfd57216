"""Where one server is in its life: starting, ready, draining, failed.

Owns the state, the start-up progress and the health answers that follow from it; what a ready
server consists of is handed in. Belongs to the event loop. Knows no engine internals.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from grpc_health.v1 import health, health_pb2

from server.errors import NotReady
from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from server.streams import Streams
from tpu_engine.front import Intake
from tpu_engine.live_plan import LivePlan
from tpu_engine.misses import MissLog
from tpu_engine.step_thread import StepThread

RETRY_AFTER_S = 2.0
# However long the start-up may take, look again after a minute.
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the engine is built."""

    intake: Intake
    steps: StepThread
    streams: Streams
    info: pb.GetModelInfoResponse
    live: LivePlan
    misses: MissLog
    swap_plan: Callable[[str], Awaitable[int]]


class Lifecycle:
    """The state of one server; every change goes to the health service as well."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Without types of its own, the health package is `Any` to us.
        self.health: Any = cast("Any", health).aio.HealthServicer()
        self.state = pb.SERVER_STATE_STARTING
        self.progress = pb.Progress(phase="starting")
        self.serving: Serving | None = None
        self._clock = clock
        self._started_s = clock()
        self._failure = ""

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_s

    def require_ready(self) -> Serving:
        """What serves new requests; raises `NotReady` with the state otherwise."""
        if self.serving is not None and self.state == pb.SERVER_STATE_READY:
            return self.serving
        if self.state == pb.SERVER_STATE_STARTING:
            raise NotReady(f"the server is starting: {self._where()}", self._retry_after_s())
        if self.state == pb.SERVER_STATE_FAILED:
            raise NotReady(f"the server failed: {self._failure}")
        raise NotReady("the server is shutting down")

    def report(self, progress: pb.Progress) -> None:
        """Takes note of start-up progress."""
        self.progress = progress

    async def announce_starting(self) -> None:
        await self._answer(serving=False)

    async def become_ready(self, serving: Serving) -> None:
        self.serving = serving
        self.state = pb.SERVER_STATE_READY
        await self._answer(serving=True)

    async def become_draining(self) -> None:
        if self.state != pb.SERVER_STATE_FAILED:
            self.state = pb.SERVER_STATE_DRAINING
        await self._answer(serving=False)

    async def become_failed(self, message: str) -> None:
        self.state, self._failure = pb.SERVER_STATE_FAILED, message
        await self._answer(serving=False)

    async def _answer(self, *, serving: bool) -> None:
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if serving else answers.NOT_SERVING
        for service in ("", SERVICE):
            await self.health.set(service, status)

    def _where(self) -> str:
        progress = self.progress
        text = progress.phase
        if progress.total:
            text += f" {progress.done}/{progress.total}"
        if progress.detail:
            text += f" {progress.detail}"
        if progress.current:
            text += f", now {progress.current}"
        if progress.HasField("seconds_left"):
            text += f", about {progress.seconds_left:.0f} s left"
        return text

    def _retry_after_s(self) -> float:
        if not self.progress.HasField("seconds_left"):
            return RETRY_AFTER_S
        return min(max(self.progress.seconds_left, RETRY_AFTER_S), MAX_RETRY_AFTER_S)
