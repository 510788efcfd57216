"""Messages between the front (text, streams) and the step loop: plain, serialisable data.

Owns the wire format of the two bounded queues, so that front and step loop can be one process or
two. Knows no transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from buckets.plan import Plan
from buckets.shape import StepShape
from tpu_engine.errors import InvalidRequest, Overloaded
from tpu_engine.request import Finish, Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Front to loop: serve this request."""

    request: Request


@dataclass(frozen=True, slots=True)
class End:
    """Front to loop: end this request now (cancel, disconnect, stop string, deadline)."""

    request_id: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class UsePlan:
    """Operator to loop: plan with these shapes from the next step on; all of them are warm."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Loop to front: tokens and, at the end, exactly one `finish`.

    `time_s` is when the tokens were known, `first_scheduled_s` when the first chunk was planned
    (None while it waits), both on the engine's clock. `num_computed_prompt_tokens` counts prompt
    tokens whose KV is in the cache.
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    time_s: float
    first_scheduled_s: float | None
    num_computed_prompt_tokens: int
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Loop to front: the request was never admitted; `error` says why. No output follows."""

    request_id: int
    error: InvalidRequest | Overloaded


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """What ran at one shape since start.

    `seconds` sums, per step, the time from its plan, or from the end of the step before it where
    that came later, until its tokens were read back: what the step added to the run.
    """

    shape: StepShape
    steps: int = 0
    useful_tokens: int = 0
    executed_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the step loop: counters since start, gauges now."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    steps: int
    useful_tokens: int
    executed_tokens: int
    watermark: str
    compile_count: int
    preemptions: int = 0
    shapes: tuple[ShapeUse, ...] = ()


Inbound = Submit | End | UsePlan
Outbound = RequestOutput | Refused
