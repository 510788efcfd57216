"""The one table from exceptions and finish reasons to gRPC status codes, with rich details.

Owns what a failure looks like on the wire. Knows no service and no stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from tpu_engine.errors import EngineError, InvalidRequest, Overloaded
from tpu_engine.live_plan import SwapRefused
from tpu_engine.request import Finish, FinishReason
from tpu_engine.step_thread import NotServing

DETAILS_KEY = "grpc-status-details-bin"
# Statuses travel as HTTP/2 headers, which peers limit to a few kilobytes.
MAX_MESSAGE_BYTES = 500


class NotReady(NotServing):
    """The server starts, drains or failed; `retry_after_s` None means ask another server."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(message)


class NotAllowed(EngineError):
    """A call that this server was not started for; says which option allows it."""


# The first class that fits wins; every other error is a fault of ours.
EXCEPTION_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotServing, grpc.StatusCode.UNAVAILABLE),
    (SwapRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
)

FINISH_CODES = {
    FinishReason.STOP: grpc.StatusCode.OK,
    FinishReason.LENGTH: grpc.StatusCode.OK,
    FinishReason.CANCELLED: grpc.StatusCode.CANCELLED,
    FinishReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    FinishReason.OVERLOAD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FinishReason.ABORTED: grpc.StatusCode.ABORTED,
    FinishReason.ERROR: grpc.StatusCode.INTERNAL,
}

# Aborted because this server goes away: the same request may succeed elsewhere at once.
SHUTDOWN = Finish(FinishReason.ABORTED, detail="the server is shutting down")


def of_exception(error: Exception) -> status_pb2.Status:
    """Status with code, one clear line and machine-readable details."""
    code = grpc.StatusCode.INTERNAL
    for kind, candidate in EXCEPTION_CODES:
        if isinstance(error, kind):
            code = candidate
            break
    return _status(code, str(error), _details(error))


def of_finish(finish: Finish) -> status_pb2.Status | None:
    """Status that follows the final message of an admitted request; None where all is well."""
    code = grpc.StatusCode.UNAVAILABLE if finish == SHUTDOWN else FINISH_CODES[finish.reason]
    if code is grpc.StatusCode.OK:
        return None
    text = f"request ended: {finish.reason}"
    return _status(code, f"{text} ({finish.detail})" if finish.detail else text, ())


def code_of(status: status_pb2.Status) -> grpc.StatusCode:
    """The enum member that belongs to a status' number."""
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


def trailing_metadata(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """What carries the rich details behind the plain status."""
    return ((DETAILS_KEY, status.SerializeToString()),)


def _status(code: grpc.StatusCode, message: str, details: Sequence[Message]) -> status_pb2.Status:
    packed: list[any_pb2.Any] = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=_clipped(message), details=packed)


def _details(error: Exception) -> list[Message]:
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_clipped(f"must be {error.limit}, got {error.given!r}")
        )
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, Overloaded):
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=error.budget, description=f"limit {error.limit}, would be {error.given}"
        )
        quota = error_details_pb2.QuotaFailure(violations=[violation])
        return [quota, _retry_info(error.retry_after_s)]
    if isinstance(error, NotReady) and error.retry_after_s is not None:
        return [_retry_info(error.retry_after_s)]
    return []


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _clipped(text: str) -> str:
    data = text.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - 3] + b"..."
    return data.decode(errors="ignore")
