"""Bytes from the wire become an `Ask`: parsing, unknown fields, presence.

Owns the strict reading of protobuf messages: invalid UTF-8, cut messages and fields or enum values
this version doesn't know are refused by name. What values may be is the front's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine.errors import InvalidRequest
from tpu_engine.front import Ask, ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

WIRE_BYTES = 2  # wire type of strings, byte strings and messages
MAX_DEPTH = 16

AnyMessage = TypeVar("AnyMessage", bound=Message)


def parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """The message in `data`.

    Raises `InvalidRequest` naming the field whose text is not UTF-8, or that isn't known here.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        _refuse_invalid_text(kind.DESCRIPTOR, data, "", MAX_DEPTH)
        raise InvalidRequest("message", f"a {kind.DESCRIPTOR.full_name}", "damaged data") from error
    for name in _unknown(message, ""):
        raise InvalidRequest(
            name, f"a field or value of {kind.DESCRIPTOR.full_name} in this version", "unknown"
        )
    return message


def ask_of(request: pb.GenerateRequest) -> Ask:
    """The request as asked; raises `InvalidRequest` where it has no prompt."""

    def optional(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    return Ask(
        prompt=prompt_of(request),
        max_tokens=optional("max_tokens"),
        temperature=optional("temperature"),
        top_k=optional("top_k"),
        top_p=optional("top_p"),
        min_p=optional("min_p"),
        seed=optional("seed"),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_in_output=request.include_stop_in_output,
        logprobs=request.logprobs,
        deadline_s=optional("deadline_s"),
    )


def prompt_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """The prompt of either request; raises `InvalidRequest` where there is none."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            turns = request.chat.messages
            return ChatPrompt(tuple(ChatMessage(turn.role, turn.content) for turn in turns))
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            return TokenPrompt(tuple(request.token_ids.ids))
        case _:
            choices = [field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields]
            raise InvalidRequest("prompt", "one of " + ", ".join(choices), "none")


def _unknown(message: Message, path: str) -> Iterator[str]:
    """Names of fields and enum values that were sent but aren't known, depth first."""
    for unknown in unknown_fields.UnknownFieldSet(message):
        yield f"{path}<field {unknown.field_number}>"
    for field, value in message.ListFields():
        enum = field.enum_type
        if field.message_type is None and enum is None:
            continue
        for index, item in enumerate(value if field.is_repeated else [value]):
            place = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            if field.message_type is not None:
                yield from _unknown(item, place + ".")
            elif enum is not None and item not in enum.values_by_number:
                yield place


def _refuse_invalid_text(descriptor: Any, data: bytes, path: str, depth: int) -> None:
    """Raises `InvalidRequest` for the first text field in `data` that is not UTF-8."""
    try:
        raw = empty_pb2.Empty.FromString(data)
    except DecodeError:
        return
    for entry in unknown_fields.UnknownFieldSet(raw):
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != WIRE_BYTES:
            continue
        name = f"{path}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                entry.data.decode()
            except UnicodeDecodeError as error:
                given = f"byte 0x{entry.data[error.start]:02x} at {error.start}"
                raise InvalidRequest(name, "valid UTF-8", given) from error
        elif field.message_type is not None and depth > 0:
            _refuse_invalid_text(field.message_type, entry.data, name + ".", depth - 1)
