"""The door of the engine: a request as asked becomes a validated `Request`.

Owns what a client may ask, the defaults of what it left open, request ids and the drawing of
seeds. Server, `generate`, `chat` and `batch` all come through here. Knows no transport, no clock
(`now` is an argument) and no step loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tpu_engine import front_checks as checks
from tpu_engine.errors import InvalidRequest
from tpu_engine.front_output import OutputAssembler
from tpu_engine.request import Request, SamplingParams
from tpu_engine.text.chat_template import ChatTemplate
from tpu_engine.text.tokenizer import Tokenizer
from tpu_engine.weights.open_model import GenerationDefaults

ROLES = ("system", "user", "assistant")
# No tokenizer in use packs more into one token, so a longer text can be refused unread.
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text; special tokens written in it are recognised."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as its client states it, unchecked; `None` means left open."""

    prompt: Prompt
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    logprobs: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A valid request and the assembler of its output."""

    request: Request
    assembler: OutputAssembler


@dataclass(slots=True)
class Intake:
    """Turns asks into requests. Its only state is the counter of ids: threads may share it.

    `vocab_size` and `max_model_len` are the served model's; `draw_seed` returns a fresh integer
    in 0 .. 2**32 - 1 for requests that name no seed; `today` is for chat templates that print it,
    `defaults` for sampling options that requests leave open.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    draw_seed: Callable[[], int]
    today: Callable[[], datetime]
    defaults: GenerationDefaults
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def admit(self, ask: Ask, now: float, limit_s: float | None = None) -> Admitted:
        """Checks `ask` and gives it an id.

        `now` is its arrival in seconds, `limit_s` how long its caller waits at most, if that is
        known. Raises `InvalidRequest` naming the first field that can't be honoured.
        """
        deadline_s = min(
            (limit for limit in (checks.deadline(ask.deadline_s), limit_s) if limit is not None),
            default=None,
        )
        prompt_ids = self.tokenize(ask.prompt)
        request = Request(
            request_id=next(self._ids),
            prompt_ids=prompt_ids,
            params=self._params(ask, len(prompt_ids)),
            arrival_s=now,
            deadline_s=None if deadline_s is None else now + deadline_s,
            eos_ids=self.eos_ids,
        )
        return Admitted(request, OutputAssembler(request, self.tokenizer, ask.logprobs))

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of `prompt`; raises `InvalidRequest` where it is empty, too long or wrong."""
        match prompt:
            case TextPrompt(text):
                field_name, ids = "text", self._encode("text", text, add_special_tokens=True)
            case TokenPrompt(given):
                field_name, ids = "token_ids", given
            case ChatPrompt(messages):
                text = self._render(messages)
                field_name, ids = "chat", self._encode("chat", text, add_special_tokens=False)
        if not ids:
            raise InvalidRequest(field_name, "at least 1 token long", "0 tokens")
        if len(ids) >= self.max_model_len:
            limit = f"at most {self.max_model_len - 1} tokens long (max_model_len "
            limit += f"{self.max_model_len}, at least one of them for the output)"
            raise InvalidRequest(field_name, limit, f"{len(ids)} tokens")
        if isinstance(prompt, TokenPrompt):
            checks.token_ids(field_name, ids, self.vocab_size)
        return ids

    def _encode(self, name: str, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if not text:
            raise InvalidRequest(name, "at least 1 character long", "")
        max_chars = self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > max_chars:
            limit = f"at most {max_chars} characters long (max_model_len {self.max_model_len})"
            raise InvalidRequest(name, limit, f"{len(text)} characters")
        checks.unicode(name, text)
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if not self.chat_template.is_available:
            raise InvalidRequest("chat", "absent (this model has no chat template)", "a chat")
        if not messages:
            raise InvalidRequest("chat.messages", "at least 1 message long", "0 messages")
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                name = f"chat.messages[{index}].role"
                raise InvalidRequest(name, "one of " + ", ".join(ROLES), message.role)
            checks.unicode(f"chat.messages[{index}].content", message.content)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.chat_template.render(turns, now=self.today())

    def _params(self, ask: Ask, num_prompt_tokens: int) -> SamplingParams:
        absent = self.defaults
        temperature = absent.temperature if ask.temperature is None else ask.temperature
        top_k = absent.top_k if ask.top_k is None else ask.top_k
        top_p = absent.top_p if ask.top_p is None else ask.top_p
        min_p = absent.min_p if ask.min_p is None else ask.min_p
        seed = self.draw_seed() if ask.seed is None else ask.seed
        return SamplingParams(
            max_tokens=checks.max_tokens(ask.max_tokens, num_prompt_tokens, self.max_model_len),
            temperature=checks.temperature(temperature),
            top_k=checks.integer("top_k", top_k, self.vocab_size),
            top_p=checks.top_p(top_p),
            min_p=checks.min_p(min_p),
            seed=checks.integer("seed", seed, checks.MAX_SEED),
            stop=checks.stop_strings(ask.stop),
            stop_token_ids=checks.stop_token_ids(ask.stop_token_ids, self.vocab_size),
            ignore_eos=ask.ignore_eos,
            include_stop_in_output=ask.include_stop_in_output,
        )
