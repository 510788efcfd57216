"""The life of a server: starting, ready, draining, failing; health, reflection, status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server import main
from server.client import EngineClient
from server.main import Server, serve
from server.options import ServerOptions
from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.server_rig import CONFIG, collect, fake_engine, ids_request, running_server
from tpu_engine.errors import InvalidConfig, InvalidModel

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FakeProgress:
    """What the builder reports."""

    phase, done, total, detail = "compile", 3, 12, "tokens=16"
    current, seconds_left = "tokens=64 seqs=8", 40.0


def retry_after_s(error: grpc.aio.AioRpcError) -> int:
    """Seconds after which the server wants to be asked again."""
    metadata = dict(cast(Any, error.trailing_metadata()))
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return retry.retry_delay.seconds


async def health(client: EngineClient, service: str = "") -> int:
    stub = cast(Any, health_pb2_grpc.HealthStub(cast(Any, client.channel)))
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_the_port_answers_while_the_engine_is_built() -> None:
    go_on = threading.Event()

    def build(config: object, report: Callable[[Any], None]) -> Any:
        report(FakeProgress())
        assert go_on.wait(10)
        return fake_engine()

    server = Server(CONFIG, ServerOptions(port=0), build=build)
    async with EngineClient(f"127.0.0.1:{await server.start()}") as client:
        ready = asyncio.create_task(server.make_ready())
        await asyncio.sleep(0.05)
        assert await health(client) == await health(client, SERVICE) == NOT_SERVING
        status = await client.status()
        assert status.state == pb.SERVER_STATE_STARTING
        expected = pb.Progress(phase="compile", done=3, total=12, detail="tokens=16")
        expected.current, expected.seconds_left = "tokens=64 seqs=8", 40.0
        assert status.progress == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(client.generate(ids_request([1])))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        text = "starting: compile 3/12 tokens=16, now tokens=64 seqs=8, about 40 s left"
        assert text in str(caught.value.details())
        assert retry_after_s(caught.value) == 40
        go_on.set()
        await ready
        assert await health(client) == await health(client, SERVICE) == SERVING
        assert (await client.status()).state == pb.SERVER_STATE_READY
        await server.drain(0.0)
        assert await health(client) == NOT_SERVING
        await server.stop()


async def test_what_the_build_raises_reaches_the_operator() -> None:
    def build(*_: object) -> Any:
        raise InvalidModel("model.safetensors: tensor x is missing")

    with pytest.raises(InvalidModel, match="tensor x"):
        await serve(CONFIG, ServerOptions(port=0), lambda _: None, build=build)


async def test_a_taken_port_is_one_clear_error() -> None:
    async with running_server() as rig:
        port = int(rig.address.rpartition(":")[2])
        server = Server(CONFIG, ServerOptions(port=port), build=cast(Any, None))
        with pytest.raises(InvalidConfig, match=f"port must be free.*{port}"):
            await server.start()


def test_plaintext_beyond_loopback_needs_the_flag_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"insecure_listen.*'0\.0\.0\.0'"):
        ServerOptions(host="0.0.0.0")
    assert ServerOptions(host="0.0.0.0", insecure_listen=True).address == "0.0.0.0:50051"
    assert ServerOptions(host="::1").address == "[::1]:50051"
    with pytest.raises(InvalidConfig, match="port"):
        ServerOptions(port=70000)
    with pytest.raises(InvalidConfig, match="grace_s"):
        ServerOptions(grace_s=float("nan"))


async def test_drain_lets_streams_finish_and_takes_no_more() -> None:
    async with running_server(step_s=0.005) as rig:
        request = ids_request([1], max_tokens=40, ignore_eos=True)
        call = rig.client.generate(request)
        stream = aiter(call)
        await anext(stream)
        drained = asyncio.create_task(rig.server.drain(10.0))
        await asyncio.sleep(0.02)
        assert await health(rig.client) == NOT_SERVING
        assert (await rig.client.status()).state == pb.SERVER_STATE_DRAINING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(rig.client.generate(request))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        last = [response async for response in stream][-1]
        assert last.finished.reason == pb.FINISH_REASON_LENGTH
        assert last.finished.usage.num_output_tokens == 40
        await drained


async def test_streams_that_outlast_the_grace_end_with_reason_and_status() -> None:
    async with running_server(step_s=0.01) as rig:
        call = rig.client.generate(ids_request([1], max_tokens=500, ignore_eos=True))
        stream = aiter(call)
        last = await anext(stream)
        drained = asyncio.create_task(rig.server.drain(0.1))
        code = grpc.StatusCode.OK
        try:
            async for response in stream:
                last = response
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert last.finished.reason == pb.FINISH_REASON_ABORTED
        assert "shutting down" in last.finished.detail
        await drained
        await rig.wait_idle()


async def test_a_broken_step_loop_ends_streams_and_is_reported() -> None:
    async with running_server(step_s=0.005) as rig:
        call = rig.client.generate(ids_request([1], max_tokens=500, ignore_eos=True))
        stream = aiter(call)
        last = await anext(stream)
        rig.built.runner.page_size = 0  # any unexpected exception in the step thread
        code = grpc.StatusCode.OK
        try:
            async for response in stream:
                last = response
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code is grpc.StatusCode.INTERNAL
        assert last.finished.reason == pb.FINISH_REASON_ERROR
        await asyncio.wait_for(rig.server.failed.wait(), 5)
        assert await health(rig.client) == NOT_SERVING
        assert (await rig.client.status()).state == pb.SERVER_STATE_FAILED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(rig.client.generate(ids_request([1])))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_reflection_lists_the_services() -> None:
    async with running_server() as rig:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, rig.client.channel))
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_model_info_and_status_say_what_is_there() -> None:
    async with running_server() as rig:
        info = await rig.client.model_info()
        assert (info.vocab_size, info.max_model_len, info.page_size) == (997, 512, 16)
        assert list(info.eos_ids) == [996]
        assert info.supports_chat
        assert [shape.num_tokens for shape in info.shapes] == [
            shape.num_tokens for shape in rig.built.plan.shapes
        ]
        await collect(rig.client.generate(ids_request([1] * 20, max_tokens=5, ignore_eos=True)))
        await rig.wait_idle()
        status = await rig.client.status()
        assert status.useful_tokens >= 24
        assert status.executed_tokens >= status.useful_tokens
        assert status.total_pages == 512
        assert status.watermark == "normal"
        assert status.steps > 0
        assert status.uptime_s > 0


CHILD = """
import asyncio, sys
sys.path.insert(0, ".")
from server.main import serve
from server.options import ServerOptions
from tests.server_rig import CONFIG, fake_engine
say = lambda line: print(line, flush=True)
options = ServerOptions(port=0, grace_s=float(sys.argv[1]))
sys.exit(asyncio.run(serve(CONFIG, options, say, build=lambda *_: fake_engine(step_s=0.05))))
"""


async def start_child(grace_s: float) -> tuple[asyncio.subprocess.Process, EngineClient]:
    """A server process and a client of it, once it is ready."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(grace_s), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    address = ""
    async for line in child.stdout:
        words = line.decode().split()
        if words[0] == "listening":
            address = words[2]
        if words[0] == "ready":
            break
    return child, EngineClient(address)


async def test_sigterm_drains_and_exits_0() -> None:
    child, client = await start_child(grace_s=20)
    async with client:
        stream = aiter(client.generate(ids_request([1], max_tokens=20, ignore_eos=True)))
        await anext(stream)
        os.kill(child.pid, signal.SIGTERM)
        last = [response async for response in stream][-1]
        assert last.finished.reason == pb.FINISH_REASON_LENGTH
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_a_second_signal_stops_at_once() -> None:
    child, client = await start_child(grace_s=60)
    async with client:
        call = client.generate(ids_request([1], max_tokens=500, ignore_eos=True))
        await anext(aiter(call))
        os.kill(child.pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        os.kill(child.pid, signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 5) == 128 + signal.SIGTERM
        call.cancel()


SILENT_CLIENT = """
import asyncio, sys
from server.client import EngineClient
from tests.server_rig import ids_request
async def main():
    async with EngineClient(sys.argv[1]) as client:
        async for _ in client.generate(ids_request([1], max_tokens=500, ignore_eos=True)):
            print("got", flush=True)
asyncio.run(main())
"""


async def test_a_client_that_vanished_without_a_word_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 500}
    options = tuple((name, quick.get(name, value)) for name, value in main.GRPC_OPTIONS)
    monkeypatch.setattr(main, "GRPC_OPTIONS", options)
    async with running_server(step_s=0.05) as rig:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SILENT_CLIENT, rig.address, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        await child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)  # its kernel goes on, its gRPC doesn't
        try:
            async with asyncio.timeout(10):  # the whole answer would take 25 s
                await rig.wait_idle()
        finally:
            child.kill()
            await child.wait()
