"""`tpu-engine generate`: one prompt, one answer, no server.

Owns the printing of one streamed answer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from server.cli.sampling import SamplingFlags
from server.cli.startup import open_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig


@dataclass(frozen=True, slots=True)
class GenerateFlags:
    """What to continue.

    Attributes:
        prompt: the prompt text; read from standard input if not given.
        chat: treat the prompt as a user's message and apply the model's chat template.
        stats: print tokens, times and finish reason after the answer, on stderr.
    """

    prompt: str | None = None
    chat: bool = False
    stats: bool = True


if TYPE_CHECKING:
    from tpu_engine.front_output import Completion

OPTIONS = (EngineConfig, GenerateFlags, SamplingFlags)


def generate(config: EngineConfig, flags: GenerateFlags, sampling: SamplingFlags) -> None:
    """Continue one prompt with an engine in this process, streaming to standard output."""
    from tpu_engine.front import ChatMessage, ChatPrompt, TextPrompt

    text = sys.stdin.read() if flags.prompt is None else flags.prompt
    if not text:
        raise InvalidConfig("prompt", "not empty", text)
    prompt = ChatPrompt((ChatMessage("user", text),)) if flags.chat else TextPrompt(text)
    _, engine = open_engine(config)
    for _, piece in engine.run([(0, sampling.ask(prompt))]):
        if isinstance(piece, EngineError):
            raise piece
        typer.echo(piece.text, nl=False)
        sys.stdout.flush()
        if piece.completion is not None:
            typer.echo()
            if flags.stats:
                typer.echo(summary(piece.completion), err=True)


def summary(completion: Completion) -> str:
    """One line about an answer: why it ended, how many tokens, how fast."""
    finish, num = completion.finish, completion.num_output_tokens
    reason = f"{finish.reason} ({finish.detail})" if finish.detail else f"{finish.reason}"
    ttft_s = completion.ttft_s or completion.e2e_s
    rate = f", {(num - 1) / (completion.e2e_s - ttft_s):.1f} tokens/s" if num > 1 else ""
    return (
        f"[{reason}; {completion.num_prompt_tokens} prompt + {num} output tokens; "
        f"first after {ttft_s:.2f} s{rate}; seed {completion.seed}]"
    )
