"""Composition root of the server: engine, step thread, streams, services and signals.

Owns the order of start and stop. The port opens before the engine is built, so that probes and
status calls are answered meanwhile. Everything it wires is made elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from server import messages
from server.errors import SHUTDOWN, NotAllowed
from server.lifecycle import Lifecycle, Serving
from server.options import ServerOptions
from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from server.service import EngineService
from server.streams import Streams
from server.version import package_version
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.front import Intake
from tpu_engine.front_engine import build_real_engine, open_intake
from tpu_engine.live_plan import LivePlan
from tpu_engine.step_thread import StepThread

if TYPE_CHECKING:
    from tpu_engine.build import BuiltEngine, Progress

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Report = Callable[["Progress"], None]
Build = Callable[[EngineConfig, Report], "BuiltEngine"]

MAX_REQUEST_BYTES = 16 * 1024 * 1024
# How long ended streams get to send their last message.
LAST_WORDS_S = 2.0
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
    # Clients and routers may ping idle connections; that is no reason to drop them.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished without a word must not hold its stream and its place for hours.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # the one that ends the connection
)


class Server:
    """One server in one event loop: `start`, `make_ready`, then `drain` and `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        build: Build | None = None,
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `InvalidConfig` for options that contradict each other."""
        if options.serve_partial and config.require_warm:
            limit = "off where require_warm is set: what is warm loads at once"
            raise InvalidConfig("serve_partial", limit, True)
        self.lifecycle = Lifecycle(clock)
        self.failed = asyncio.Event()
        self.failure = ""
        self._failing: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None
        self._live: LivePlan | None = None
        self._config = config
        self._options = options
        self._build = build or partial(build_real_engine, partial=options.serve_partial)
        self._report = report
        self._clock = clock
        self._grpc = grpc.aio.server(options=GRPC_OPTIONS)

    async def start(self) -> int:
        """Opens the port and answers NOT_SERVING; returns the port number.

        Raises `InvalidConfig` where the address can't be had.
        """
        await self.lifecycle.announce_starting()
        service = EngineService(self.lifecycle, package_version(), self._clock)
        self._grpc.add_generic_rpc_handlers((service.handlers(),))
        health_service = cast("Any", health_pb2_grpc)
        health_service.add_HealthServicer_to_server(self.lifecycle.health, self._grpc)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (SERVICE, health_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        try:
            port = self._grpc.add_insecure_port(self._options.address)
        except RuntimeError as error:
            limit = "free on this machine, and host one of its addresses"
            raise InvalidConfig("port", limit, self._options.address) from error
        await self._grpc.start()
        return port

    async def make_ready(self) -> None:
        """Builds the engine in a thread and starts to serve; raises what the build raises."""
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            loop.call_soon_threadsafe(self.lifecycle.report, messages.progress(progress))
            if self._report is not None:
                self._report(progress)

        built = await _in_daemon_thread(
            lambda: self._build(self._config, report), name="build-engine"
        )
        config = built.config
        streams = Streams(loop, config.max_num_seqs + config.max_waiting)

        def on_fault(error: Exception) -> None:
            loop.call_soon_threadsafe(self._note_failure, error)

        steps = StepThread(
            built.loop, self._clock, on_outputs=streams.deliver_soon, on_fault=on_fault
        )
        intake = open_intake(built)
        steps.start()
        info = _model_info(built, intake)
        live = self._live = LivePlan(built.executables, steps.use_plan, built.plan)
        serving = Serving(intake, steps, streams, info, live, built.misses, self._swap_plan)
        await self.lifecycle.become_ready(serving)
        if live.begin_rest():
            self._changing = asyncio.create_task(self._change(live))

    async def drain(self, grace_s: float) -> None:
        """Takes no more requests, lets running ones finish for `grace_s`, ends the rest."""
        await self.lifecycle.become_draining()
        serving = self.lifecycle.serving
        if serving is None:
            return
        if not await serving.streams.wait_idle(grace_s):
            for request_id in serving.streams.request_ids:
                serving.steps.end(request_id, SHUTDOWN)
            await serving.streams.wait_idle(LAST_WORDS_S)

    async def stop(self) -> None:
        """Closes the port and stops the step thread. Call `drain` first."""
        await self._grpc.stop(grace=LAST_WORDS_S)
        if self.lifecycle.serving is not None:
            await asyncio.to_thread(self.lifecycle.serving.steps.stop)

    @property
    def is_changing_plan(self) -> bool:
        """Whether a thread of ours may be compiling."""
        return self._live is not None and self._live.is_changing

    async def _swap_plan(self, plan_yaml: str) -> int:
        """Starts the change to another plan; returns how many shapes have to be warmed."""
        if not self._options.allow_plan_swap:
            raise NotAllowed("this server takes no other plan: start it with allow_plan_swap")
        assert self._live is not None, "there are no calls before the engine is built"
        count = await asyncio.to_thread(self._live.begin_swap, plan_yaml)
        self._changing = asyncio.create_task(self._change(self._live))
        return count

    async def _change(self, live: LivePlan) -> None:
        """Sees a change of plan through that was begun."""
        changing = asyncio.ensure_future(_in_daemon_thread(live.run, name="change-plan"))
        await asyncio.wait((changing,))
        live.end(changing.exception())
        if live.change.error:
            _log.error("the change of plan failed: %s", live.change.error)

    def _note_failure(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._failing = asyncio.create_task(self._fail())

    async def _fail(self) -> None:
        await self.lifecycle.become_failed(self.failure)
        self.failed.set()


async def serve(
    config: EngineConfig,
    options: ServerOptions,
    announce: Callable[[str], None],
    report: Report | None = None,
    build: Build | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the process' exit code.

    `announce` gets one line per change of state. The first signal drains, the second one ends the
    process at once. Raises what building the engine raises.
    """
    server = Server(config, options, build, report)
    asked = asyncio.create_task(_watch_signals(announce).wait())
    port = await server.start()
    announce(f"listening on {options.host}:{port}")
    try:
        await _make_ready(server, asked, announce)
        failed = asyncio.create_task(server.failed.wait())
        await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if server.failed.is_set():
            announce(f"the step loop failed: {server.failure}")
        await server.drain(options.grace_s)
    finally:
        asked.cancel()
        await server.stop()
    announce("stopped")
    code = 1 if server.failed.is_set() else 0
    if server.is_changing_plan:
        os._exit(code)  # a compiler at work in another thread must not hold up the exit
    return code


async def _make_ready(
    server: Server, asked: asyncio.Task[Literal[True]], announce: Callable[[str], None]
) -> None:
    """Waits for the engine; ends the process where a signal comes first."""
    started_s = time.monotonic()
    ready = asyncio.create_task(server.make_ready())
    await asyncio.wait((ready, asked), return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await server.drain(0.0)
        await server.stop()
        announce("stopped before the engine was ready")
        # A compiler at work in another thread can't be interrupted and must not hold up the exit.
        os._exit(0)
    await ready
    announce(f"ready after {time.monotonic() - started_s:.1f} s")


def _watch_signals(announce: Callable[[str], None]) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        announce(f"{signal.Signals(number).name}: draining; a second signal stops at once")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


async def _in_daemon_thread(work: Callable[[], Result], name: str) -> Result:
    """Does `work` in a thread that doesn't keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - a thread's top: the awaiting side raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def _model_info(built: BuiltEngine, intake: Intake) -> pb.GetModelInfoResponse:
    """All but the shapes, which may change."""
    config, defaults = built.config, intake.defaults
    return pb.GetModelInfoResponse(
        model=config.model,
        vocab_size=intake.vocab_size,
        eos_ids=sorted(intake.eos_ids),
        supports_chat=intake.chat_template.is_available,
        max_model_len=intake.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        page_size=config.page_size,
        defaults=pb.SamplingDefaults(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            not_applied=defaults.not_applied,
        ),
        version=package_version(),
    )
