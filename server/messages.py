"""The engine's types as protocol messages.

Owns this one-way translation. Knows no stream and no service.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine.front_output import Completion
from tpu_engine.live_plan import LivePlan
from tpu_engine.messages import EngineStatus, ShapeUse
from tpu_engine.misses import MissLog
from tpu_engine.request import FinishReason, Request

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.OVERLOAD: pb.FINISH_REASON_OVERLOAD,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


class Shape(Protocol):
    """A compiled shape; `buckets.shape.StepShape` is one."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def pages_per_seq(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...
    @property
    def variant(self) -> str: ...


class StartProgress(Protocol):
    """One line of start-up; `tpu_engine.build.Progress` is one."""

    @property
    def phase(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def detail(self) -> str: ...
    @property
    def current(self) -> str: ...
    @property
    def seconds_left(self) -> float | None: ...


def shape(given: Shape) -> pb.StepShape:
    return pb.StepShape(
        num_tokens=given.num_tokens,
        num_seqs=given.num_seqs,
        pages_per_seq=given.pages_per_seq,
        num_logit_rows=given.num_logit_rows,
        variant=given.variant,
    )


def progress(given: StartProgress) -> pb.Progress:
    """How far the start-up is."""
    return pb.Progress(
        phase=given.phase,
        done=given.done,
        total=given.total,
        detail=given.detail,
        current=given.current,
        seconds_left=given.seconds_left,
    )


def started(request: Request) -> pb.GenerateResponse:
    """The first event of a stream."""
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_ids),
            max_tokens=request.params.max_tokens,
            seed=request.params.seed,
        )
    )


def finished(completion: Completion) -> pb.GenerateResponse:
    """The last event of a stream."""
    finish = completion.finish
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=FINISH_REASONS[finish.reason],
            detail=finish.detail,
            stop_token_id=finish.stop_token_id,
            stop_string=finish.stop_string,
            usage=pb.Usage(
                num_prompt_tokens=completion.num_prompt_tokens,
                num_output_tokens=completion.num_output_tokens,
            ),
            timings=pb.Timings(
                queue_s=completion.queue_s, ttft_s=completion.ttft_s, e2e_s=completion.e2e_s
            ),
            seed=completion.seed,
        )
    )


def fill_status(target: pb.GetServerStatusResponse, status: EngineStatus) -> None:
    """Copies the step loop's counters and gauges."""
    target.running = status.running
    target.waiting = status.waiting
    target.free_pages = status.free_pages
    target.total_pages = status.total_pages
    target.compile_count = status.compile_count
    target.steps = status.steps
    target.useful_tokens = status.useful_tokens
    target.executed_tokens = status.executed_tokens
    target.watermark = status.watermark
    target.preemptions = status.preemptions


def fill_shapes(
    target: pb.GetServerStatusResponse, uses: Iterable[ShapeUse], live: LivePlan
) -> None:
    """Lists what ran at which shape, how each executable was had, and the change of the plan."""
    executables = live.executables
    records = executables.records
    warm, used = executables.warm_shapes, {use.shape: use for use in uses}
    latest = {record.shape: record for record in records}
    for each in sorted({*live.shapes, *used, *latest}):
        use, record = used.get(each, ShapeUse(each)), latest.get(each)
        status = target.shapes.add(
            shape=shape(each),
            steps=use.steps,
            useful_tokens=use.useful_tokens,
            executed_tokens=use.executed_tokens,
            step_s=use.seconds,
            in_plan=each in live.shapes,
        )
        if record is not None and each in warm:
            status.source, status.source_s = record.source, record.seconds
            status.note = record.note
    seconds = {"compiled": 0.0, "loaded": 0.0}
    for record in records:
        seconds[record.source] += record.seconds
    target.compile_s, target.load_s = seconds["compiled"], seconds["loaded"]
    target.load_count = sum(record.source == "loaded" for record in records)
    change = live.change
    target.plan_change.CopyFrom(
        pb.PlanChange(
            phase=change.phase,
            kind=change.what,
            done=change.done,
            total=change.total,
            current=change.current,
            seconds_left=change.seconds_left,
            error=change.error,
        )
    )


def fill_misses(target: pb.GetServerStatusResponse, misses: MissLog) -> None:
    """Lists the steps that had no executable."""
    target.miss_count, target.miss_s = misses.count, misses.seconds
    for miss in misses.recent:
        target.misses.add(
            shape=shape(miss.shape),
            request_ids=miss.request_ids,
            why=miss.why,
            outcome=miss.outcome,
            seconds=miss.seconds,
        )
