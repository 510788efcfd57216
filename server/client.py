"""A typed client of `tpu_engine.v1`: what `chat`, `bench`, `demo` and tests talk through.

Owns the method names and message types of the client side. Knows no command and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from server.proto import SERVICE
from server.proto.tpu_engine.v1 import engine_pb2 as pb

GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
Reply = TypeVar("Reply", bound=Message)

# Every client its own connection: streams of one process must not wait for each other's window.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class EngineClient:
    """One connection to a server; use it as an async context manager.

    Calls raise `grpc.aio.AioRpcError`, whose code and details are the server's.
    """

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._generate = self.channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.channel.close()

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> GenerateCall:
        """Starts a request; iterate over the call for its events, `cancel()` it to leave."""
        return self._generate(request, timeout=timeout_s)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return await self._unary("Tokenize", request, pb.TokenizeResponse.FromString)

    async def model_info(self) -> pb.GetModelInfoResponse:
        request = pb.GetModelInfoRequest()
        return await self._unary("GetModelInfo", request, pb.GetModelInfoResponse.FromString)

    async def status(self) -> pb.GetServerStatusResponse:
        request = pb.GetServerStatusRequest()
        return await self._unary("GetServerStatus", request, pb.GetServerStatusResponse.FromString)

    async def swap_plan(self, plan_yaml: str) -> int:
        """Starts the change to another plan; returns how many shapes have to be warmed."""
        request = pb.SwapPlanRequest(plan_yaml=plan_yaml)
        reply = await self._unary("SwapPlan", request, pb.SwapPlanResponse.FromString)
        return reply.shapes_to_warm

    async def cancel(self, request_id: int) -> bool:
        """Ends a request; False where no open one has that id."""
        request = pb.CancelRequest(request_id=request_id)
        reply = await self._unary("Cancel", request, pb.CancelResponse.FromString)
        return reply.found

    async def _unary(
        self, method: str, request: Message, deserialize: Callable[[bytes], Reply]
    ) -> Reply:
        call = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=_serialize,
            response_deserializer=deserialize,
        )
        return await call(request)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
