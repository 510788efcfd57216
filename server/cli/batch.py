"""`tpu-engine batch`: a file of requests through an engine in this process.

Owns the loop from input line to output line and its progress bar. Line formats and the resumable
output belong to `server.batch_file`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from server.cli.startup import open_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from server.batch_file import OutputFile
    from tpu_engine.front import Ask
    from tpu_engine.front_offline import OfflineEngine
    from tpu_engine.front_output import Piece


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """Which file to answer, and where.

    Attributes:
        input: JSONL file, one request a line (text, token_ids or messages, and options).
        output: JSONL file, line i answers input line i; what it already holds is kept.
    """

    input: str
    output: str


@dataclass(slots=True)
class Answer:
    """What one line has produced so far."""

    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


OPTIONS = (BatchFlags, EngineConfig)


def batch(flags: BatchFlags, config: EngineConfig) -> None:
    """Answer a JSONL file of requests; run it again after a kill to go on where it stopped."""
    from server.batch_file import OutputFile, input_lines

    input_path, output_path = Path(flags.input), Path(flags.output)
    if not input_path.is_file():
        raise InvalidConfig("input", "an existing file", flags.input)
    num_lines = sum(1 for _ in input_lines(input_path, 0))
    with OutputFile(output_path, input_path, config.model) as output:
        done_before = output.num_done
        if done_before < num_lines:
            _, engine = open_engine(config)
            _answer_all(engine, output, input_path, config.model, num_lines)
        now = output.num_done - done_before
        refused = f', {output.num_refused} refused (see "error")' if output.num_refused else ""
        typer.echo(f"{output.num_done} lines, {now} of them now{refused}", err=True)


def _answer_all(
    engine: OfflineEngine[int], output: OutputFile, input_path: Path, model: str, num_lines: int
) -> None:
    from server.batch_file import input_lines, line_id, line_key, parse_line, refusal_record

    heads: dict[int, dict[str, object]] = {}
    answers: dict[int, Answer] = {}

    def asks() -> Iterator[tuple[int, Ask]]:
        for index, line in input_lines(input_path, output.num_done):
            heads[index] = {"key": line_key(model, line), "id": line_id(line)}
            try:
                ask = parse_line(line)
            except InvalidRequest as error:
                output.put(index, {**heads.pop(index), **refusal_record(error)})
                continue
            answers[index] = Answer()
            yield index, ask

    with _progress() as bars:
        bar = bars.add_task("lines", total=num_lines, completed=output.num_done)
        for index, piece in engine.run(asks()):
            if isinstance(piece, EngineError):
                record = refusal_record(piece)
            else:
                record = _extended(answers[index], piece)
            if record is not None:
                del answers[index]
                output.put(index, {**heads.pop(index), **record})
                bars.update(bar, completed=output.num_done)


def _extended(answer: Answer, piece: Piece) -> dict[str, object] | None:
    """Adds a piece to an answer; its record once it is complete."""
    from server.batch_file import answer_record

    answer.text.append(piece.text)
    answer.token_ids += piece.token_ids
    answer.logprobs += piece.logprobs
    if piece.completion is None:
        return None
    return answer_record("".join(answer.text), answer.token_ids, answer.logprobs, piece.completion)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not Console(stderr=True).is_terminal,
    )
