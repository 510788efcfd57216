"""Chat messages to prompt text, by the template that comes with the model.

Owns the sandboxed Jinja environment and the conventions templates rely on. Doesn't know token
ids, files or the clock: the date is an argument. The result already holds all special tokens, so
it is encoded with `add_special_tokens=False`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpu_engine.errors import InvalidModel, InvalidRequest

# What a template can end in when it meets messages it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """The chat template of one model; `source` None says that the model has none.

    `special_tokens` are the variables templates use for them (`bos_token`, `eos_token`, ...).
    Raises `InvalidModel` where the template is not valid Jinja.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if source is None:
            return
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidModel(f"chat template: not valid: {error}") from None

    @property
    def is_available(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages` (each with at least `role` and `content`).

        `now` is for templates that print the date; `variables` are further names the template may
        use (`tools`, ...). Raises `InvalidRequest` where there is no template, or it refuses the
        messages, with the template's own reason.
        """
        if self._template is None:
            limit = "absent, as this model has no chat template: send text or token ids instead"
            raise InvalidRequest("messages", limit, f"{len(messages)} messages")
        _check_messages(messages)
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _date_printer(now),
        }
        try:
            return self._template.render(names)
        except _RENDER_ERRORS as error:
            limit = "accepted by the model's chat template"
            raise InvalidRequest("messages", limit, f"refusal: {error}") from None


def choose_template(value: object, where: str) -> str | None:
    """The source in a config's `chat_template`: text, or a list of named ones (`default` is used).

    Raises `InvalidModel` naming `where` for anything else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in cast(list[object], value):
            named = cast(dict[str, object], entry) if isinstance(entry, dict) else {}
            source = named.get("template")
            if named.get("name") == "default" and isinstance(source, str):
                return source
    raise InvalidModel(
        f"{where}: chat_template must be text, or a list with a template named 'default'"
    )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages", "at least one message", [])
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{place}].role", "a string", message.get("role"))
        if "content" not in message:
            raise InvalidRequest(f"messages[{place}].content", "present", None)


def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as written in prompts: unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _date_printer(now: datetime | None) -> Callable[[str], str]:
    def strftime_now(date_format: str) -> str:
        if now is None:
            raise jinja2.TemplateError("the template prints the date, and none was given")
        return now.strftime(date_format)

    return strftime_now
