"""The compile cache: one executable per `StepShape`, built ahead of time, kept on disk.

Owns executables, the count of compiler runs and the rule that nothing compiles after `freeze()`.
What it compiles is passed in as a lowering function; knows no model and no engine.

Files hold serialised executables, which are code: point `directory` only at a folder you trust.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import serialize_executable

from buckets.shape import StepShape

Source = Literal["compiled", "loaded"]
_SUFFIX = ".executable"
_DIGEST_BYTES = 32


class MissingExecutable(KeyError):
    """A shape without an executable was asked for after the cache was frozen."""


@dataclass(frozen=True, slots=True)
class ExecutableRecord:
    """How one shape got its executable: compiled here or loaded from disk, and in how long."""

    shape: StepShape
    source: Source
    seconds: float
    note: str = ""


class CompileCache:
    """Executables by shape.

    `lower` traces and lowers the program of a shape for `devices` (the first one when None);
    `directory` None keeps everything in memory. A stored file that is damaged or that this
    machine refuses is set aside, named in the record's `note` and rebuilt. A folder that can be
    read but not written serves what it holds; what it lacks is compiled, and the note says so.
    """

    def __init__(
        self,
        lower: Callable[[StepShape], jax.stages.Lowered],
        directory: Path | None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self._lower = lower
        self._devices = jax.devices()[:1] if devices is None else list(devices)
        self._directory = directory
        self._executables: dict[StepShape, jax.stages.Compiled] = {}
        self._records: list[ExecutableRecord] = []
        self._frozen = False
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def compile_count(self) -> int:
        """Programs the compiler built in this process (not those loaded from disk)."""
        return sum(record.source == "compiled" for record in self._records)

    @property
    def records(self) -> tuple[ExecutableRecord, ...]:
        return tuple(self._records)

    def build(self, shapes: Iterable[StepShape]) -> Iterable[ExecutableRecord]:
        """Builds or loads every shape that has no executable yet, yielding a record for each."""
        for shape in shapes:
            if shape in self._executables:
                continue
            if self._frozen:
                raise MissingExecutable(shape)
            record = self._build_one(shape)
            self._records.append(record)
            yield record

    def freeze(self) -> None:
        """From now on a shape without an executable is an error, never a compile."""
        self._frozen = True

    def get(self, shape: StepShape) -> jax.stages.Compiled:
        """Returns the executable of `shape`; `MissingExecutable` when there is none."""
        try:
            return self._executables[shape]
        except KeyError:
            raise MissingExecutable(shape) from None

    def _build_one(self, shape: StepShape) -> ExecutableRecord:
        started = time.monotonic()
        lowered = self._lower(shape)
        path, note = None, ""
        if self._directory is not None:
            path = self._directory / (program_key(lowered, self._devices) + _SUFFIX)
            executable, note = _load(path, lowered, self._devices)
            if executable is not None:
                self._executables[shape] = executable
                return ExecutableRecord(shape, "loaded", time.monotonic() - started)
        compiled = lowered.compile()
        if path is not None:
            note = " ".join(filter(None, (note, _store(path, compiled))))
        self._executables[shape] = compiled
        return ExecutableRecord(shape, "compiled", time.monotonic() - started, note)


def program_key(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> str:
    """Names a program and everything that decides what the compiler makes of it.

    StableHLO text (without source locations), versions, devices, compiler flags, and on CPU the
    processor's features.
    """
    parts = [
        lowered.as_text(),
        jax.__version__,
        version("jaxlib"),
        devices[0].client.platform_version,
        f"{devices[0].device_kind} x {len(devices)}",
        os.environ.get("XLA_FLAGS", ""),
    ]
    if devices[0].platform == "cpu":
        parts.append(_cpu_features())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _cpu_features() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            wanted = ("flags", "Features", "model name")
            return "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _load(
    path: Path, lowered: jax.stages.Lowered, devices: Sequence[Any]
) -> tuple[jax.stages.Compiled | None, str]:
    """Returns the stored executable, or None and why the file was set aside ("" if absent)."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path.name}: can't be read: {error.strerror}"
    payload = content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
        return None, _set_aside(path, "checksum differs")
    try:
        executable = serialize_executable.deserialize_and_load(
            payload, lowered.in_tree, lowered.out_tree, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, EOFError) as error:
        return None, _set_aside(path, f"refused: {error}")
    return executable, ""


def _set_aside(path: Path, reason: str) -> str:
    try:
        path.replace(path.with_suffix(".damaged"))
    except OSError as error:
        return f"{path.name}: {reason}; rebuilt, can't be set aside: {error.strerror}"
    return f"{path.name}: {reason}; set aside and rebuilt"


def _store(path: Path, compiled: jax.stages.Compiled) -> str:
    """Writes under a temporary name, then renames: readers see a whole file or none.

    Returns "", or why the file could not be written.
    """
    payload, _, _ = serialize_executable.serialize(compiled)
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return f"not stored: {error.strerror}"
    return ""
