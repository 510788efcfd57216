"""Command-line flags made from option classes, and the configuration file behind them.

Owns the way from `--flag` and file key to a frozen options object: the classes' fields are the
flags, their docstrings the help. The command line overrides the file. Also the place where a
command's errors become one clear line. Knows no command.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import tomllib
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
import yaml

from server.options import ServerOptions
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig

# A configuration file may hold options of every one of these, whatever command reads it.
FILE_CLASSES = (EngineConfig, ServerOptions)


class OptionClass(Protocol):
    """A dataclass whose docstring has an `Attributes:` section."""

    __dataclass_fields__: typing.ClassVar[dict[str, Field[Any]]]


def with_flags(
    *classes: type[OptionClass],
    optional: tuple[type[OptionClass], ...] = (),
    argument: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates `command(*options)`: it gets one object of each class, in order.

    Adds `--config` (where a class can be read from a file) and `--debug`. Of an `optional` class
    the command gets None where none of its options is given. The field called `argument` is given
    by its place, without a flag.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            debug = given.pop("debug")
            with_file = given.pop("config", None)
            run_reporting_errors(
                lambda: command(*read_options(classes, given, with_file, optional)), debug=debug
            )

        parameters = [p for cls in classes for p in _parameters(cls, cls in optional)]
        parameters = [_argument(p) if p.name == argument else p for p in parameters]
        if any(cls in FILE_CLASSES for cls in classes):
            parameters.append(_flag("config", Path | None, None, "YAML or TOML file of options."))
        parameters.append(
            _flag("debug", bool, False, "Show the traceback of an error.", is_switch=True)
        )
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010
        return run

    return decorate


def read_options(
    classes: Sequence[type[OptionClass]],
    given: Mapping[str, Any],
    path: Path | None,
    optional: tuple[type[OptionClass], ...] = (),
) -> list[Any]:
    """One object of each class: flags (None is "not given") over file over defaults.

    Raises `InvalidConfig` naming an option that is unknown, missing or wrong.
    """
    stated: dict[str, Any] = {} if path is None else read_file(path)
    stated.update({name: value for name, value in given.items() if value is not None})
    options: list[Any] = []
    for cls in classes:
        is_stated = any(field.name in stated for field in fields(cls))
        options.append(_build(cls, stated) if is_stated or cls not in optional else None)
    return options


def read_file(path: Path) -> dict[str, Any]:
    """The options in a YAML or TOML file; `InvalidConfig` for keys nobody knows."""
    try:
        text = path.read_text()
        content: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise InvalidConfig("config", "a readable file", f"{path} ({error.strerror})") from error
    except (ValueError, yaml.YAMLError) as error:  # both parsers raise plain ones for bad dates
        line = " ".join(str(error).split())
        raise InvalidConfig("config", "valid YAML or TOML", f"{path} ({line})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig("config", "a table of options", f"{path}: {type(content).__name__}")
    table = typing.cast(dict[Any, Any], content)
    known = [field.name for cls in FILE_CLASSES for field in fields(cls)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise InvalidConfig(str(key), f"a known option (nearest: {near[0]})", table[key])
    return {str(key): value for key, value in table.items()}


def run_reporting_errors(action: Callable[[], None], *, debug: bool) -> None:
    """Runs a command; whatever goes wrong becomes one line on stderr and an exit code."""
    try:
        action()
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say
        raise typer.Exit(141) from None
    except Exception as error:  # noqa: BLE001 - the process' top
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {describe(error)}", err=True)
        raise typer.Exit(1) from None


def describe(error: Exception) -> str:
    """One line about `error`."""
    if isinstance(error, EngineError):
        return str(error)
    details = getattr(error, "details", None)
    if callable(details):  # a gRPC status
        code = getattr(error, "code")()  # noqa: B009
        return f"{code.name}: {details()}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"internal error, {type(error).__name__}: {error} (--debug shows where)"


def option_help(cls: type[OptionClass]) -> dict[str, str]:
    """Help text per field, from the `Attributes:` section of the class' docstring."""
    section = inspect.getdoc(cls) or ""
    section = section.partition("Attributes:\n")[2]
    pattern = r"^ {4}(\w+): (.*(?:\n {5,}.*)*)"
    entries = re.findall(pattern, section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _parameters(cls: type[OptionClass], is_optional: bool) -> list[inspect.Parameter]:
    hints, helps = typing.get_type_hints(cls), option_help(cls)
    panel = (inspect.getdoc(cls) or "").splitlines()[0].partition(";")[0].rstrip(".")
    parameters: list[inspect.Parameter] = []
    for field in fields(cls):
        is_list = typing.get_origin(hints[field.name]) is tuple
        kind = list[str] | None if is_list else _without_none(hints[field.name]) | None
        text = helps[field.name] + _default_text(field, is_optional)
        # `--no-...` where there is something to turn off. What a file turns on, it turns off.
        is_switch = field.default is False
        text = text[0].upper() + text[1:]
        parameters.append(_flag(field.name, kind, None, text, panel, is_switch=is_switch))
    return parameters


def _default_text(field: Field[Any], is_optional: bool) -> str:
    if field.default is MISSING:
        return "" if is_optional else " (required)"
    if field.default in (None, ()) or field.default is False:
        return ""
    return f" (default: {'on' if field.default is True else field.default})"


def _flag(
    name: str,
    kind: Any,
    default: Any,
    help_text: str,
    panel: str | None = None,
    *,
    is_switch: bool = False,
) -> inspect.Parameter:
    names = (flag_name(name),) if is_switch else ()
    option = typer.Option(*names, help=help_text, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _argument(flag: inspect.Parameter) -> inspect.Parameter:
    """The same option, given by its place."""
    kind, option = typing.get_args(flag.annotation)
    name = flag.name.upper()
    place = typer.Argument(help=option.help, show_default=False, metavar=name)
    return flag.replace(annotation=Annotated[kind, place])


def flag_name(option: str) -> str:
    """`--max-tokens` for `max_tokens`."""
    return "--" + option.replace("_", "-")


def _build(cls: type[OptionClass], stated: Mapping[str, Any]) -> OptionClass:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in stated:
            values[field.name] = _checked(field.name, hints[field.name], stated[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            place = " or a --config file" if cls in FILE_CLASSES else ""
            limit = f"given: use {flag_name(field.name)}{place}"
            raise InvalidConfig(field.name, limit, None)
    return cls(**values)


def _checked(name: str, hint: Any, value: Any) -> Any:
    """`value` as it is, if it is of the field's type (integers may stand for floats)."""
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    expected = _without_none(hint)
    is_optional = expected is not hint
    if value is None and is_optional:
        return None
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise InvalidConfig(name, f"of type {expected.__name__}", value)
    return value


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint
