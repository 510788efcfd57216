"""What the server refuses at the door: code, field, limit and value, and that it lives on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from server.proto.tpu_engine.v1.engine_pb2_grpc import EngineStub
from server.validation import parse
from tests.server_rig import Rig, collect, ids_request, running_server
from tpu_engine.errors import InvalidRequest


def text_request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", **fields)


def chat_request(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages))


# field named, part of the description, request
BAD: list[tuple[str, str, pb.GenerateRequest]] = [
    ("prompt", "one of text, token_ids, chat", pb.GenerateRequest()),
    ("text", "at least 1", pb.GenerateRequest(text="")),
    ("text", "at most 511 tokens", pb.GenerateRequest(text="x" * 512)),
    ("text", "600000 characters", pb.GenerateRequest(text="x" * 600_000)),
    ("token_ids", "at least 1", ids_request([])),
    ("token_ids", "at most 511 tokens", ids_request([1] * 512)),
    ("token_ids[1]", "got 997", ids_request([1, 997])),
    ("token_ids[0]", "from 0 to 996", ids_request([-1])),
    ("token_ids[0]", "got 9223372036854775807", ids_request([2**63 - 1])),
    ("chat.messages", "at least 1", chat_request()),
    ("chat.messages[1].role", "one of system, user", chat_request(("user", "a"), ("robot", "b"))),
    ("max_tokens", "got 0", text_request(max_tokens=0)),
    ("max_tokens", "got -5", text_request(max_tokens=-5)),
    ("max_tokens", "from 1 to 507", text_request(max_tokens=508)),
    ("temperature", "got nan", text_request(temperature=math.nan)),
    ("temperature", "got inf", text_request(temperature=math.inf)),
    ("temperature", "got -1.0", text_request(temperature=-1)),
    ("temperature", "0.001", text_request(temperature=1e-9)),
    ("top_k", "got -1", text_request(top_k=-1)),
    ("top_k", "from 0 to 997", text_request(top_k=998)),
    ("top_p", "got 0.0", text_request(top_p=0)),
    ("top_p", "got nan", text_request(top_p=math.nan)),
    ("top_p", "at most 1", text_request(top_p=1.01)),
    ("min_p", "got -0.1", text_request(min_p=-0.1)),
    ("min_p", "got inf", text_request(min_p=math.inf)),
    ("seed", "got -1", text_request(seed=-1)),
    ("seed", "4294967295", text_request(seed=2**32)),
    ("stop", "at most 16", text_request(stop=["a"] * 17)),
    ("stop[1]", "0 characters", text_request(stop=["a", ""])),
    ("stop[0]", "256", text_request(stop=["a" * 257])),
    ("stop_token_ids[0]", "got 1000", text_request(stop_token_ids=[1000])),
    ("stop_token_ids", "at most 64", text_request(stop_token_ids=[1] * 65)),
    ("deadline_s", "got 0.0", text_request(deadline_s=0)),
    ("deadline_s", "got nan", text_request(deadline_s=math.nan)),
    ("deadline_s", "got -1.0", text_request(deadline_s=-1)),
]


def violation(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest.FieldViolation:
    """The one field violation in a refusal's rich details."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    metadata: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    return bad_request.field_violations[0]


async def refusal(rig: Rig, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(rig.client.generate(request))
    return caught.value


async def test_bad_input_is_refused_with_field_limit_and_value() -> None:
    async with running_server() as rig:
        for field, text, request in BAD:
            error = await refusal(rig, request)
            found = violation(error)
            assert found.field == field, (found, request)
            assert text in found.description, (found, request)
            assert field in str(error.details())
        status = await rig.client.status()
        assert status.steps == 0
        answer = await collect(rig.client.generate(text_request(max_tokens=507, ignore_eos=True)))
        assert answer.finished.usage.num_output_tokens == 507
        await rig.wait_idle()


async def raw(rig: Rig, data: bytes, method: str = "Generate") -> grpc.aio.AioRpcError:
    """Sends bytes as they are and returns the refusal."""
    call = rig.client.channel.unary_stream(f"/{SERVICE}/{method}")(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_damaged_messages_are_refused_by_field() -> None:
    async with running_server() as rig:
        bad_text = pb.GenerateRequest(text="a?c", max_tokens=1).SerializeToString()
        found = violation(await raw(rig, bad_text.replace(b"?", b"\xff")))
        assert found.field == "text"
        assert "0xff at 1" in found.description
        chat = chat_request(("user", "a?c")).SerializeToString().replace(b"?", b"\xc3")
        assert violation(await raw(rig, chat)).field == "chat.messages.content"
        good = text_request(max_tokens=1).SerializeToString()
        assert violation(await raw(rig, good[:4])).field == "message"
        unknown = violation(await raw(rig, good + b"\xd2\x09\x01x"))
        assert unknown.field == "<field 154>"
        assert "GenerateRequest" in unknown.description
        assert violation(await raw(rig, b"\x08\x01", "Tokenize")).field == "<field 1>"
        answer = await collect(rig.client.generate(text_request(max_tokens=1)))
        assert len(answer.token_ids) == 1


def test_fields_unknown_inside_submessages_and_enum_values_are_named() -> None:
    inner = pb.ChatMessage(role="user", content="x").SerializeToString() + b"\x18\x07"
    chat = b"\x0a" + bytes([len(inner)]) + inner
    data = b"\x1a" + bytes([len(chat)]) + chat
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[0\]\.<field 3>"):
        parse(pb.GenerateRequest, data)
    with pytest.raises(InvalidRequest, match="reason must be"):
        parse(pb.Finished, b"\x08\x63")


async def test_rich_details_are_readable_with_grpc_status() -> None:
    async with running_server() as rig:
        with grpc.insecure_channel(rig.address) as channel:

            def call() -> grpc.RpcError:
                with pytest.raises(grpc.RpcError) as caught:
                    list(EngineStub(channel).Generate(text_request(max_tokens=0)))
                return caught.value

            error: Any = await asyncio.to_thread(call)
        status = rpc_status.from_call(error)
        assert status is not None
        assert "max_tokens" in status.message


async def test_long_values_in_refusals_are_clipped() -> None:
    async with running_server() as rig:
        error = await refusal(rig, chat_request(("x" * 5000, "hello")))
        assert len(str(error.details())) <= 500
        assert violation(error).field == "chat.messages[0].role"


async def test_a_refusal_of_wide_characters_fits_into_headers() -> None:
    async with running_server() as rig:
        error = await refusal(rig, chat_request(("\U0001f600" * 500, "hello")))
        assert violation(error).field == "chat.messages[0].role"
        headers = dict(error.trailing_metadata() or ())
        quoted = 3 * len(str(error.details()).encode())  # each byte is sent as %XX
        assert quoted + 4 / 3 * len(headers["grpc-status-details-bin"]) < 4096


async def test_a_long_request_is_read_and_tokenised_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_server() as rig:
        tokenizer = rig.built.model.tokenizer
        encode = type(tokenizer).encode
        threads: list[str] = []

        def watched(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread().name)
            return encode(self, text, add_special_tokens)

        monkeypatch.setattr(type(tokenizer), "encode", watched)
        for text in ("short", "long " * 10_000):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await rig.client.tokenize(pb.TokenizeRequest(text=text))
            with contextlib.suppress(grpc.aio.AioRpcError):
                await collect(rig.client.generate(pb.GenerateRequest(text=text, max_tokens=1)))
        main = threading.main_thread().name
        assert [name == main for name in threads] == [True, True, False, False]
