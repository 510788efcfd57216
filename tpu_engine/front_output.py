"""One request's output on its way to the client: token ids become text, the end gets its facts.

Owns incremental text, stop strings, usage and timings of one request. Knows no transport and no
step loop: it is fed the loop's outputs and says when the loop must end the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_engine.messages import End, RequestOutput
from tpu_engine.request import Finish, FinishReason, Request
from tpu_engine.text.detokenizer import Detokenizer
from tpu_engine.text.stop_strings import StopMatcher
from tpu_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended, what it used and how long it took.

    `num_output_tokens` counts every token id shown, an end-of-sequence token included. Times are
    seconds since arrival; `queue_s` and `ttft_s` are None where that moment never came.
    """

    finish: Finish
    num_prompt_tokens: int
    num_output_tokens: int
    seed: int
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one request.

    `logprobs` is empty unless asked for. `completion` is set on the last piece. `end` is a
    message the caller must pass to the step loop: a stop string ended the request there.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion | None = None
    end: End | None = None


class OutputAssembler:
    """Feeds on one request's `RequestOutput`s in order and yields `Piece`s.

    The text of a stop token is shown only with `include_stop_in_output`, text of special tokens
    never; the ids of both are. Nothing of a matched stop string is shown unless asked for.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, logprobs: bool = False) -> None:
        params = request.params
        self._request = request
        self._logprobs = logprobs
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(params.stop, params.include_stop_in_output)
        self._num_output_tokens = 0
        self._first_token_s: float | None = None
        self._first_scheduled_s: float | None = None

    def feed(self, output: RequestOutput) -> Piece:
        """The piece that `output` adds; after one with a `completion` there are no more."""
        if self._first_scheduled_s is None:
            self._first_scheduled_s = output.first_scheduled_s
        text: list[str] = []
        matched: str | None = None
        num_shown = 0
        for token_id in output.token_ids:
            num_shown += 1
            if self._is_shown(token_id, output.finish):
                found = self._matcher.feed(self._detokenizer.feed((token_id,)))
                text.append(found.text)
                matched = found.matched
                if matched is not None:
                    break
        if output.finish is not None and matched is None:
            found = self._matcher.feed(self._detokenizer.flush())
            text += [found.text, self._matcher.flush()]
            matched = found.matched
        if num_shown and self._first_token_s is None:
            self._first_token_s = output.time_s
        self._num_output_tokens += num_shown
        finish, end = output.finish, None
        if matched is not None:
            finish = Finish(FinishReason.STOP, stop_string=matched)
            end = None if output.finish else End(self._request.request_id, finish)
        return Piece(
            text="".join(text),
            token_ids=output.token_ids[:num_shown],
            logprobs=output.logprobs[:num_shown] if self._logprobs else (),
            completion=None if finish is None else self._completion(finish, output.time_s),
            end=end,
        )

    def _is_shown(self, token_id: int, finish: Finish | None) -> bool:
        if finish is None or self._request.params.include_stop_in_output:
            return True
        return token_id != finish.stop_token_id

    def _completion(self, finish: Finish, time_s: float) -> Completion:
        arrival_s = self._request.arrival_s
        first, scheduled = self._first_token_s, self._first_scheduled_s
        return Completion(
            finish=finish,
            num_prompt_tokens=len(self._request.prompt_ids),
            num_output_tokens=self._num_output_tokens,
            seed=self._request.params.seed,
            queue_s=None if scheduled is None else scheduled - arrival_s,
            ttft_s=None if first is None else first - arrival_s,
            e2e_s=time_s - arrival_s,
        )
