"""Sampling flags of the commands that generate, and their way into an `Ask`.

Owns the flag names; the limits are the front's. What is wrong whatever the model is refused
before an engine is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tpu_engine import front_checks as checks

if TYPE_CHECKING:
    from tpu_engine.front import Ask, Prompt

MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How to continue a prompt; what isn't given takes the model's default.

    Attributes:
        max_tokens: most tokens of the answer; what the context leaves if not given.
        temperature: 0 is greedy.
        top_k: sample among this many likeliest tokens; 0 keeps all.
        top_p: sample among the likeliest tokens with this total probability.
        min_p: leave out tokens less likely than this share of the likeliest.
        seed: of the random draws, 0 to 4294967295; a fresh one if not given.
        stop: text that ends the answer; may be given several times.
        ignore_eos: go on after the model's end-of-sequence token.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, largest in (
            ("max_tokens", MAX_INT64),
            ("top_k", MAX_INT64),
            ("seed", checks.MAX_SEED),
        ):
            value = getattr(self, name)
            if value is not None:
                checks.integer(name, value, largest)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None:
                getattr(checks, name)(value)
        checks.stop_strings(self.stop)

    def ask(self, prompt: Prompt) -> Ask:
        """The request for the offline engine."""
        from tpu_engine.front import Ask

        return Ask(
            prompt=prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )

    def message(self) -> pb.GenerateRequest:
        """The request for a server, its prompt still to be set."""
        return pb.GenerateRequest(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )
