"""The engine's types as protocol messages.

Owns this one-way translation. Knows no stream and no service.
"""

from __future__ import annotations

from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine.front_output import Completion
from tpu_engine.messages import EngineStatus
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
