"""The `tpu_engine.v1.Engine` service: each method of the interface, on the event loop.

Owns the way of one call: parse, admit, submit, stream, end. Every stop of a call (client gone,
deadline, cancel) sends one `End` to the step loop, so pages come back at once. Knows no arrays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from server import errors, messages
from server.lifecycle import Lifecycle, Serving
from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from server.validation import ask_of, parse, prompt_of
from tpu_engine.errors import EngineError
from tpu_engine.front import Admitted
from tpu_engine.front_output import Completion
from tpu_engine.messages import End, Refused, RequestOutput
from tpu_engine.request import Finish, FinishReason

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, Message]"

Result = TypeVar("Result")

# Reading and tokenising more than this takes milliseconds: other streams go on meanwhile.
LONG_REQUEST_BYTES = 16 * 1024
CLIENT_GONE = Finish(FinishReason.CANCELLED, detail="the client went away")
CALL_DEADLINE = Finish(FinishReason.DEADLINE, detail="the deadline of the call")
CANCEL_CALL = Finish(FinishReason.CANCELLED, detail="ended by Cancel")


class EngineService:
    """Serves whatever `lifecycle` says is there; `version` is reported to clients."""

    def __init__(
        self, lifecycle: Lifecycle, version: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifecycle = lifecycle
        self._version = version
        self._clock = clock

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods as gRPC wants them. Requests arrive as bytes: we parse them ourselves."""
        unary = {
            "Tokenize": self.tokenize,
            "GetModelInfo": self.get_model_info,
            "GetServerStatus": self.get_server_status,
            "Cancel": self.cancel,
            "SwapPlan": self.swap_plan,
        }
        methods = {name: _unary_handler(method) for name, method in unary.items()}
        methods["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.generate, response_serializer=_serialize
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, data: bytes, context: Context) -> None:
        """Streams one request from admission to its end."""
        try:
            finish = await self._generate(data, context)
        except EngineError as error:
            await _abort(context, errors.of_exception(error))
            return
        status = errors.of_finish(finish)
        if status is not None:
            await _abort(context, status)

    async def _generate(self, data: bytes, context: Context) -> Finish:
        streams = self._lifecycle.require_ready().streams
        streams.reserve()
        try:
            admitted = await self._admit(data, context.time_remaining())
            return await self._stream(self._lifecycle.require_ready(), admitted, context)
        finally:
            streams.release()

    async def _admit(self, data: bytes, limit_s: float | None) -> Admitted:
        intake, now = self._lifecycle.require_ready().intake, self._clock()

        def admit() -> Admitted:
            return intake.admit(ask_of(parse(pb.GenerateRequest, data)), now, limit_s)

        return await _beside_long(data, admit)

    async def _stream(self, serving: Serving, admitted: Admitted, context: Context) -> Finish:
        request = admitted.request
        stream = serving.streams.open(request.request_id)
        is_over = False
        try:
            serving.steps.submit(request)
            await context.write(messages.started(request))
            while True:
                outputs = await stream.take()
                delta, completion, end = _assemble(admitted, outputs)
                is_over = completion is not None
                if end is not None:
                    serving.steps.end(end.request_id, end.finish)
                if delta.token_ids or delta.text:
                    await context.write(pb.GenerateResponse(delta=delta))
                if completion is not None:
                    await context.write(messages.finished(completion))
                    return completion.finish
        finally:
            serving.streams.close(request.request_id)
            if not is_over:
                serving.steps.end(request.request_id, _why_cut(context))

    async def tokenize(self, data: bytes, context: Context) -> pb.TokenizeResponse:
        intake = self._lifecycle.require_ready().intake

        def tokenize() -> pb.TokenizeResponse:
            ids = intake.tokenize(prompt_of(parse(pb.TokenizeRequest, data)))
            return pb.TokenizeResponse(token_ids=ids)

        return await _beside_long(data, tokenize)

    async def get_model_info(self, data: bytes, context: Context) -> pb.GetModelInfoResponse:
        parse(pb.GetModelInfoRequest, data)
        serving = self._lifecycle.require_ready()
        info = pb.GetModelInfoResponse()
        info.CopyFrom(serving.info)
        info.shapes.extend(map(messages.shape, serving.live.shapes))
        return info

    async def get_server_status(self, data: bytes, context: Context) -> pb.GetServerStatusResponse:
        parse(pb.GetServerStatusRequest, data)
        lifecycle = self._lifecycle
        status = pb.GetServerStatusResponse(
            state=lifecycle.state, version=self._version, uptime_s=lifecycle.uptime_s
        )
        if lifecycle.state == pb.SERVER_STATE_STARTING:
            status.progress.CopyFrom(lifecycle.progress)
        if lifecycle.serving is not None:
            status.open_streams = len(lifecycle.serving.streams)
            steps = lifecycle.serving.steps.status()
            messages.fill_status(status, steps)
            messages.fill_shapes(status, steps.shapes, lifecycle.serving.live)
            messages.fill_misses(status, lifecycle.serving.misses)
        return status

    async def swap_plan(self, data: bytes, context: Context) -> pb.SwapPlanResponse:
        serving = self._lifecycle.require_ready()
        count = await serving.swap_plan(parse(pb.SwapPlanRequest, data).plan_yaml)
        return pb.SwapPlanResponse(shapes_to_warm=count)

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        request_id = parse(pb.CancelRequest, data).request_id
        serving = self._lifecycle.serving
        found = serving is not None and request_id in serving.streams
        if serving is not None and found:
            serving.steps.end(request_id, CANCEL_CALL)
        return pb.CancelResponse(found=found)


async def _beside_long(data: bytes, work: Callable[[], Result]) -> Result:
    """Does `work` on the request in `data`: in a thread where that takes long."""
    return await asyncio.to_thread(work) if len(data) > LONG_REQUEST_BYTES else work()


def _assemble(
    admitted: Admitted, outputs: Sequence[RequestOutput | Refused]
) -> tuple[pb.Delta, Completion | None, End | None]:
    """Everything `outputs` add, as one delta; nothing after a completion. Raises refusals."""
    delta = pb.Delta()
    for output in outputs:
        if isinstance(output, Refused):
            raise output.error
        piece = admitted.assembler.feed(output)
        delta.text += piece.text
        delta.token_ids.extend(piece.token_ids)
        delta.logprobs.extend(piece.logprobs)
        if piece.completion is not None:
            return delta, piece.completion, piece.end
    return delta, None, None


def _why_cut(context: Context) -> Finish:
    remaining_s = cast("float | None", context.time_remaining())
    return CALL_DEADLINE if remaining_s is not None and remaining_s <= 0 else CLIENT_GONE


def _unary_handler(
    method: Callable[[bytes, Context], Awaitable[Message]],
) -> grpc.RpcMethodHandler[bytes, Message]:
    async def call(data: bytes, context: Context) -> Message | None:
        try:
            return await method(data, context)
        except EngineError as error:
            return await _abort(context, errors.of_exception(error))

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _abort(context: Context, status: Status) -> None:
    code, metadata = errors.code_of(status), errors.trailing_metadata(status)
    await context.abort(code, status.message, metadata)
