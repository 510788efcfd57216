"""`Sequence`: one live request with its tokens, its state and its stop conditions.

Owns the state of a request (every move is checked against the one table), the tokens the host
knows and the rules by which a token ends it. Doesn't know slots, pages or other requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tpu_engine.messages import RequestOutput
from tpu_engine.request import (
    LEGAL_TRANSITIONS,
    Finish,
    FinishReason,
    Request,
    RequestState,
)


class IllegalTransition(RuntimeError):
    """A request was moved between states the table doesn't connect: a program error."""


class Sequence:
    """A request that was accepted and has not ended.

    `tokens[:num_known]` are the prompt and the generated tokens the host has seen. `limit` is the
    most tokens it may ever have (prompt + max_tokens); the last of them is never computed.
    """

    __slots__ = (
        "first_scheduled_s",
        "limit",
        "num_known",
        "num_preemptions",
        "num_prompt",
        "request",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        params = request.params
        self.request = request
        self.state = RequestState.WAITING_ADMISSION
        self.num_prompt = len(request.prompt_ids)
        self.num_known = self.num_prompt
        self.limit = self.num_prompt + params.max_tokens
        self.tokens: NDArray[np.int32] = np.zeros(self.limit, np.int32)
        self.tokens[: self.num_prompt] = request.prompt_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= request.eos_ids
        self.first_scheduled_s: float | None = None
        self.num_preemptions = 0

    @property
    def num_generated(self) -> int:
        return self.num_known - self.num_prompt

    def move(self, state: RequestState) -> None:
        """Enters `state`; staying is no move. Raises `IllegalTransition`."""
        if state is self.state:
            return
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"request {self.request.request_id}: {self.state} -> {state} is not a legal move"
            )
        self.state = state

    def append(self, token_id: int) -> Finish | None:
        """Adds a sampled token; returns how the request ends if this token ends it."""
        self.tokens[self.num_known] = token_id
        self.num_known += 1
        if token_id in self.stop_ids:
            return Finish(FinishReason.STOP, stop_token_id=token_id)
        if self.num_known == self.limit:
            return Finish(FinishReason.LENGTH)
        return None

    def finish(self, finish: Finish) -> None:
        """Moves to the terminal state that belongs to `finish`."""
        if finish.reason is FinishReason.CANCELLED:
            self.move(RequestState.CANCELLED)
        elif finish.reason in (FinishReason.STOP, FinishReason.LENGTH) and (
            self.state is not RequestState.WAITING_ADMISSION
        ):
            self.move(RequestState.FINISHED)
        else:
            self.move(RequestState.ABORTED)

    def output(
        self,
        now: float,
        num_computed: int,
        token: tuple[int, float] | None = None,
        finish: Finish | None = None,
    ) -> RequestOutput:
        """The message for one token (`token` is id and log-probability), for the end, or both.

        `num_computed` counts this sequence's tokens in the KV cache.
        """
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=() if token is None else (token[0],),
            logprobs=() if token is None else (token[1],),
            time_s=now,
            first_scheduled_s=self.first_scheduled_s,
            num_computed_prompt_tokens=min(num_computed, self.num_prompt),
            finish=finish,
        )
