"""A request as the engine sees it: sampling parameters, life cycle, finish reasons.

Owns the state names, the one table of legal transitions and the validated request type.
Doesn't know text, gRPC, pages or time: `now` is always an argument, prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class RequestState(StrEnum):
    """Where a request is in its life (docs/architecture.md, "A request's life")."""

    WAITING_ADMISSION = "waiting_admission"
    PREFILL_READY = "prefill_ready"
    PREFILL_RUNNING = "prefill_running"
    PREFILL_PAUSED = "prefill_paused"
    DECODE_READY = "decode_ready"
    DECODING = "decoding"
    DECODE_PREEMPTED = "decode_preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    ABORTED = "aborted"


_S = RequestState
TERMINAL_STATES = frozenset({_S.FINISHED, _S.CANCELLED, _S.REJECTED, _S.ABORTED})
_ENDS = frozenset({_S.FINISHED, _S.CANCELLED, _S.ABORTED})

LEGAL_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    _S.WAITING_ADMISSION: frozenset({_S.PREFILL_READY, _S.CANCELLED, _S.REJECTED, _S.ABORTED}),
    _S.PREFILL_READY: frozenset({_S.PREFILL_RUNNING, _S.PREFILL_PAUSED}) | _ENDS,
    _S.PREFILL_RUNNING: frozenset({_S.PREFILL_READY, _S.PREFILL_PAUSED, _S.DECODE_READY}) | _ENDS,
    _S.PREFILL_PAUSED: frozenset({_S.PREFILL_READY}) | _ENDS,
    _S.DECODE_READY: frozenset({_S.DECODING, _S.DECODE_PREEMPTED}) | _ENDS,
    _S.DECODING: frozenset({_S.DECODE_READY, _S.DECODE_PREEMPTED}) | _ENDS,
    _S.DECODE_PREEMPTED: frozenset({_S.DECODE_READY, _S.PREFILL_READY}) | _ENDS,
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.ABORTED: frozenset(),
}


class FinishReason(StrEnum):
    """Why an admitted request ended. Protecting capacity never looks like `stop`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    OVERLOAD = "overload"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended.

    `stop_token_id` or `stop_string` is the evidence of a `stop`; `detail` explains the rest
    ("kv_capacity", "client disconnected", ...).
    """

    reason: FinishReason
    detail: str = ""
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of sampling; validated at the door, immutable afterwards.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are "off". `seed` is always
    set (the front draws a fresh one when the client gives none and reports it).
    `stop` strings are matched on text by the front, `stop_token_ids` and EOS by the scheduler.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request: token ids in, at most `params.max_tokens` token ids out.

    `request_id` is ours, unique per attempt in this process. `arrival_s` and `deadline_s` are on
    the engine's clock (seconds); `deadline_s` None means no deadline.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    eos_ids: frozenset[int] = field(default_factory=frozenset[int])
