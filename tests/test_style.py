"""The budgets of our own code: short files, short functions, few parameters, honest names.

Every test lists all offenders at once, as `path:line: what`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PRODUCT = ("tpu_engine", "kernels", "buckets", "server")
EVERYTHING = (*PRODUCT, "benchmarks", "tests")

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_KERNEL_FUNCTION_LINES = 150
MAX_PARAMETERS = 7
# The top of the process, of the step thread, and of the thread that builds the engine.
BROAD_EXCEPTS = ("server/cli/flags.py", "server/main.py", "tpu_engine/step_thread.py")

BANNED_NAMES = re.compile(r"^(handle_|process_|do_[a-z])|(^|_)(utils?|helpers?|manager)(_|$)", re.I)
BANNED_TEXT = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
ARRAY_TYPES = re.compile(r"\b(Array|NDArray|Int32|Int64|Float32|Bool)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(packages: tuple[str, ...]) -> dict[Path, ast.Module]:
    """Path to syntax tree of every file we wrote (generated code is not ours)."""
    paths = (path for package in packages for path in (REPO / package).rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in paths if "_pb2" not in path.name}


def functions(packages: tuple[str, ...]) -> Iterator[tuple[Path, Function]]:
    for path, tree in sources(packages).items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(REPO)}:{line}: {what}"


def is_kernel(path: Path) -> bool:
    return path.is_relative_to(REPO / "kernels")


def parameters(function: Function) -> list[ast.arg]:
    """Parameters besides `self`, `cls` and arrays."""
    given = function.args
    return [
        arg
        for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)
        if arg.arg not in ("self", "cls")
        and not (arg.annotation and ARRAY_TYPES.search(ast.unparse(arg.annotation)))
    ]


def test_files_are_short() -> None:
    offenders: list[str] = []
    for path in sources(EVERYTHING):
        count = len(path.read_text().splitlines())
        if count > (MAX_KERNEL_FILE_LINES if is_kernel(path) else MAX_FILE_LINES):
            offenders.append(at(path, count, f"{count} lines"))
    assert offenders == []


def test_functions_are_short() -> None:
    offenders: list[str] = []
    for path, function in functions(EVERYTHING):
        count = (function.end_lineno or 0) - function.lineno + 1
        if count > (MAX_KERNEL_FUNCTION_LINES if is_kernel(path) else MAX_FUNCTION_LINES):
            offenders.append(at(path, function.lineno, f"{function.name} has {count} lines"))
    assert offenders == []


def test_functions_take_few_parameters() -> None:
    offenders = [
        at(path, function.lineno, f"{function.name} takes {len(parameters(function))}")
        for path, function in functions((*PRODUCT, "benchmarks"))
        if len(parameters(function)) > MAX_PARAMETERS
    ]
    assert offenders == []


def test_names_say_what_things_are() -> None:
    offenders: list[str] = []
    for path, tree in sources(EVERYTHING).items():
        if BANNED_NAMES.search(path.stem):
            offenders.append(at(path, 1, path.stem))
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef) and BANNED_NAMES.search(node.name):
                offenders.append(at(path, node.lineno, node.name))
    assert offenders == []


def test_modules_say_what_they_own() -> None:
    offenders = [
        at(path, 1, "no docstring")
        for path, tree in sources((*PRODUCT, "benchmarks")).items()
        if tree.body and not ast.get_docstring(tree)
    ]
    assert offenders == []


def test_nothing_is_left_undone() -> None:
    offenders: list[str] = []
    for path in sources(EVERYTHING):
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if BANNED_TEXT.search(line):
                offenders.append(at(path, number, line.strip()))
    assert offenders == []


def test_no_function_writes_a_module_global() -> None:
    offenders = [
        at(path, node.lineno, "global")
        for path, tree in sources(EVERYTHING).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert offenders == []


def test_only_the_top_of_a_process_or_thread_catches_everything() -> None:
    found = [
        str(path.relative_to(REPO))
        for path, tree in sources(PRODUCT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)))
    ]
    assert sorted(found) == list(BROAD_EXCEPTS)
