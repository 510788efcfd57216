"""`SchedulerLimits`: what the scheduler must keep, and which requests it can serve at all.

Owns the limits beside the plan's budgets and the checks at the door. Knows no queue and no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_engine.errors import InvalidRequest
from tpu_engine.request import Request
from tpu_engine.scheduler.memory import WatermarkLevels


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler must keep, beside the budgets that the plan already is.

    Attributes:
        max_model_len: prompt plus output tokens of one request.
        page_size: token positions per page.
        max_waiting: requests that may wait for a slot.
        max_chunk: largest prefill chunk of one request in one step; None: no own limit.
        min_prefill_tokens: prompt tokens that every step with waiting prompts computes at least.
        growth_pages: pages kept free per decoding request when a new one is admitted.
        readmit_growth_pages: the same when a preempted one returns; more, so that it stays.
        retry_after_s: what a refused client is told to wait.
        watermarks: the levels of the reported watermark.
    """

    max_model_len: int
    page_size: int
    max_waiting: int = 1024
    max_chunk: int | None = None
    min_prefill_tokens: int = 16
    growth_pages: int = 1
    readmit_growth_pages: int = 4
    retry_after_s: float = 1.0
    watermarks: WatermarkLevels = field(default_factory=WatermarkLevels)

    def require_servable(self, request: Request, num_usable_pages: int) -> None:
        """Raises `InvalidRequest` for a request that could never run to its end.

        The last output token is never computed, so it needs no place in the KV cache.
        """
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        if num_prompt < 1:
            raise InvalidRequest("prompt", "at least 1 token", num_prompt)
        if max_tokens < 1:
            raise InvalidRequest("max_tokens", "at least 1", max_tokens)
        if num_prompt >= self.max_model_len:
            most = self.max_model_len - 1
            raise InvalidRequest("prompt", f"at most {most} tokens (max_model_len)", num_prompt)
        if num_prompt + max_tokens > self.max_model_len:
            most = self.max_model_len - num_prompt
            limit = f"at most {most} after a prompt of {num_prompt} tokens (max_model_len)"
            raise InvalidRequest("max_tokens", limit, max_tokens)
        fits = num_usable_pages * self.page_size + 1
        if num_prompt + max_tokens > fits:
            limit = f"at most {fits} tokens (the KV pool)"
            raise InvalidRequest("prompt + max_tokens", limit, num_prompt + max_tokens)
