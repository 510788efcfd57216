"""JSON lines of `tpu-engine batch`: what a line may ask, and an output that survives a kill.

Owns both line formats and the rule that output line i answers input line i. Each output line
carries a key of what it answers, so a resumed run can tell that it continues the same work. Knows
no engine.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from tpu_engine.errors import InvalidConfig, InvalidRequest, Overloaded
from tpu_engine.front import Ask, ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from tpu_engine.front_output import Completion

PROMPT_KEYS = ("text", "token_ids", "messages")
# What an input line may hold besides its prompt and its `id`, with the JSON types of each.
OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "stop": (list,),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "include_stop_in_output": (bool,),
    "logprobs": (bool,),
    "deadline_s": (int, float),
}


def line_key(model: str, line: bytes) -> str:
    """Names the work of one input line."""
    return hashlib.sha256(model.encode() + b"\0" + line.rstrip(b"\r\n")).hexdigest()[:16]


def line_id(line: bytes) -> object:
    """The client's own `id` of a line, None where there is none or the line can't be read."""
    try:
        content: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, object], content).get("id") if isinstance(content, dict) else None


def parse_line(line: bytes) -> Ask:
    """The request of one input line; raises `InvalidRequest` naming the key that is wrong."""
    try:
        content: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("line", "a JSON object", str(error)) from error
    if not isinstance(content, dict):
        raise InvalidRequest("line", "a JSON object", type(content).__name__)
    fields = cast(dict[str, Any], content)
    known = ("id", *PROMPT_KEYS, *OPTION_TYPES)
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidRequest(name, f"a known key (nearest: {near})", fields[name])
    options = {name: fields[name] for name in OPTION_TYPES if fields.get(name) is not None}
    for name, value in options.items():
        _check_type(name, value, OPTION_TYPES[name])
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if name in options:
            options[name] = _tuple_of(name, options[name], kind)
    return Ask(prompt=_prompt(fields), **options)


def answer_record(
    text: str, token_ids: list[int], logprobs: list[float], completion: Completion
) -> dict[str, object]:
    """The output of a line that was served."""
    finish = completion.finish
    record: dict[str, object] = {"text": text, "token_ids": token_ids}
    if logprobs:
        record["logprobs"] = logprobs
    record["finish_reason"] = str(finish.reason)
    for name in ("detail", "stop_token_id", "stop_string"):
        if getattr(finish, name) not in ("", None):
            record[name] = getattr(finish, name)
    record["num_prompt_tokens"] = completion.num_prompt_tokens
    record["num_output_tokens"] = completion.num_output_tokens
    record["seed"] = completion.seed
    return record


def refusal_record(error: InvalidRequest | Overloaded) -> dict[str, object]:
    """The output of a line that can't be served."""
    if isinstance(error, InvalidRequest):
        facts = {"field": error.field, "limit": error.limit, "given": repr(error.given)[:200]}
        return {"error": {"message": str(error)[:500], **facts}}
    return {"error": {"message": str(error)}}


class OutputFile:
    """The output of one batch run, written strictly in the order of the input.

    Opening it takes an exclusive lock, cuts off a torn last line and counts what is already there
    (`num_done`); `num_refused` counts lines that got an error since then. Raises `InvalidConfig`
    where another run holds the file, or its lines answer another input.
    """

    def __init__(self, path: Path, input_path: Path, model: str) -> None:
        self._waiting: dict[int, bytes] = {}
        self.num_refused = 0
        self._file: BinaryIO = path.open("a+b")
        with ExitStack() as undo:
            undo.callback(self._file.close)
            self._lock(path)
            self.num_done = self._count_lines(path, input_path, model)
            undo.pop_all()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def put(self, index: int, record: dict[str, object]) -> None:
        """Takes the answer of line `index`; writes it once all lines before it are written."""
        self.num_refused += "error" in record
        self._waiting[index] = json.dumps({"index": index, **record}).encode() + b"\n"
        while (line := self._waiting.pop(self.num_done, None)) is not None:
            self._file.write(line)
            self._file.flush()
            self.num_done += 1

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            limit = "a file that no other batch run is writing"
            raise InvalidConfig("output", limit, str(path)) from error

    def _count_lines(self, path: Path, input_path: Path, model: str) -> int:
        self._file.seek(0)
        num_done, end = 0, 0
        with input_path.open("rb") as asked:
            for line in self._file:
                key = line_key(model, asked.readline())
                self._check_line(line, num_done, key, path)
                if not line.endswith(b"\n"):
                    break  # the write that a kill cut short
                num_done, end = num_done + 1, end + len(line)
        self._file.truncate(end)
        return num_done

    def _check_line(self, line: bytes, index: int, key: str, path: Path) -> None:
        """Refuses a line that no run of this input wrote, and the torn beginning of such a line."""
        head = json.dumps({"index": index, "key": key}).encode().removesuffix(b"}")
        if line.endswith(b"\n"):
            is_ours = line.startswith(head) and _is_json(line)
        else:
            is_ours = line.startswith(head) or head.startswith(line)
        if not is_ours:
            limit = "absent, or the beginning of a run with this model and input"
            raise InvalidConfig("output", limit, f"{path}, line {index + 1}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def input_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Lines of the input from index `start` on, with their indices."""
    with path.open("rb") as lines:
        for index, line in enumerate(lines):
            if index >= start:
                yield index, line


def _prompt(fields: dict[str, Any]) -> Prompt:
    given = [name for name in PROMPT_KEYS if fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("prompt", "exactly one of " + ", ".join(PROMPT_KEYS), given)
    name = given[0]
    value = fields[name]
    if name == "text":
        _check_type(name, value, (str,))
        return TextPrompt(value)
    _check_type(name, value, (list,))
    if name == "token_ids":
        return TokenPrompt(_tuple_of(name, value, int))
    return ChatPrompt(tuple(_message(index, turn) for index, turn in enumerate(value)))


def _message(index: int, turn: object) -> ChatMessage:
    name = f"messages[{index}]"
    fields = cast("dict[str, Any]", turn if isinstance(turn, dict) else {})
    if set(fields) != {"role", "content"}:
        raise InvalidRequest(name, "an object with role and content", cast("object", turn))
    for key in ("role", "content"):
        _check_type(f"{name}.{key}", fields[key], (str,))
    return ChatMessage(fields["role"], fields["content"])


def _tuple_of(name: str, values: list[Any], kind: type) -> tuple[Any, ...]:
    for index, value in enumerate(values):
        _check_type(f"{name}[{index}]", value, (kind,))
    return tuple(values)


def _check_type(name: str, value: object, kinds: tuple[type, ...]) -> None:
    is_flag = isinstance(value, bool) and bool not in kinds
    if is_flag or not isinstance(value, kinds):
        limit = "of type " + " or ".join(kind.__name__ for kind in kinds)
        raise InvalidRequest(name, limit, value)
