"""One executable: found in the store and loaded, or compiled and stored.

Owns the steps from a shape to an executable and the words for how it came about. What is compiled
is passed in as `Programs`; which shapes are wanted, and when, is for the callers to say.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from buckets.cache_key import CacheKey
from buckets.cache_store import CacheStore, Rejected, Stored
from buckets.executable_facts import ExecutableFacts, facts_of
from buckets.program_key import CompilerOptions, cache_key, program_fingerprint
from buckets.shape import StepShape

Source = Literal["compiled", "loaded"]
# Kind of the records that lead from a recipe to a program's fingerprint.
RECIPE = "recipe"


class Programs(Protocol):
    """What there is to compile: one program per shape, for some devices.

    `recipe` is a digest of everything that decides the program before it is traced: source code,
    model, options. Equal recipes must give equal programs; it spares a warm start the lowering.
    """

    @property
    def devices(self) -> list[Any]: ...
    @property
    def mesh_axes(self) -> Mapping[str, int]: ...
    def recipe(self, shape: StepShape) -> str: ...
    def compiler_options(self, shape: StepShape) -> CompilerOptions: ...
    def lower(self, shape: StepShape) -> jax.stages.Lowered: ...
    def trees(self, shape: StepShape) -> tuple[Any, Any]:
        """Structures of `(args, kwargs)` and of the results."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutableRecord:
    """How one shape got its executable.

    Attributes:
        seconds: all of it: lowering where that was needed, compiling or loading, storing.
        note: what went wrong on the way, or "".
        facts: what the compiler said of it; None where it was stored without.
    """

    shape: StepShape
    source: Source
    seconds: float
    note: str = ""
    facts: ExecutableFacts | None = None


class DeviceRefusal(Exception):
    """A device would not load an executable that is whole; says why."""


@dataclass(slots=True)
class _Wanted:
    """A shape on its way: its key, and its lowered program once somebody needed it."""

    shape: StepShape
    key: CacheKey
    lowered: jax.stages.Lowered | None
    lower_s: float


class ExecutableSource:
    """Gets executables of `programs` from `store` (None: keeps nothing)."""

    def __init__(self, programs: Programs, store: CacheStore | None) -> None:
        self._programs = programs
        self._store = store
        if store is not None:
            _turn_off_jax_cache()

    def key(self, shape: StepShape) -> CacheKey:
        """The key under which `shape` is stored by a machine like this one."""
        return self._want(shape).key

    def recipe_digest(self, shape: StepShape) -> str:
        """A name for the work of building `shape`, known before anything is lowered."""
        return self._recipe(shape).digest()

    def stored_facts(self, shapes: Iterable[StepShape]) -> dict[StepShape, ExecutableFacts]:
        """The facts of those shapes whose recipe is known and whose entry is listed."""
        if self._store is None:
            return {}
        listed = self._store.entries()
        found: dict[StepShape, ExecutableFacts] = {}
        for shape in shapes:
            key = self._known_key(self._recipe(shape))
            entry = None if key is None else listed.get(key.digest())
            facts = None if entry is None else ExecutableFacts.from_json(entry.facts)
            if facts is not None:
                found[shape] = facts
        return found

    def load(self, shape: StepShape) -> tuple[jax.stages.Compiled | None, ExecutableRecord]:
        """The stored executable, or None and, in the record's note, why there is none."""
        started = time.monotonic()
        wanted = self._want(shape)
        compiled, facts, note = self._load(wanted)
        record = ExecutableRecord(shape, "loaded", time.monotonic() - started, note, facts)
        return compiled, record

    def obtain(self, shape: StepShape) -> tuple[jax.stages.Compiled, ExecutableRecord]:
        """The stored executable, or one compiled now and stored."""
        started = time.monotonic()
        wanted = self._want(shape)
        loaded, facts, note = self._load(wanted)
        if loaded is not None:
            record = ExecutableRecord(shape, "loaded", time.monotonic() - started, note, facts)
            return loaded, record
        compiled, facts, stored = self._compile(wanted)
        note = "; ".join(filter(None, (note, stored)))
        record = ExecutableRecord(shape, "compiled", time.monotonic() - started, note, facts)
        return compiled, record

    def compile_missing(self, shape: StepShape) -> tuple[ExecutableRecord, bool]:
        """Compiles and stores what the store lacks; needs no device that can run it.

        Returns the record, and whether something was compiled.
        """
        started = time.monotonic()
        wanted = self._want(shape)
        found = None if self._store is None else self._store.read(wanted.key.digest())
        if isinstance(found, Stored):
            facts = ExecutableFacts.from_json(found.facts)
            seconds = time.monotonic() - started
            return ExecutableRecord(shape, "loaded", seconds, "", facts), False
        note = "" if found is None else found.reason
        _, facts, stored = self._compile(wanted)
        note = "; ".join(filter(None, (note, stored)))
        seconds = time.monotonic() - started
        return ExecutableRecord(shape, "compiled", seconds, note, facts), True

    def _want(self, shape: StepShape) -> _Wanted:
        """The key of a shape: by its recipe where that is known, else by lowering."""
        recipe = self._recipe(shape)
        known = self._known_key(recipe)
        if known is not None:
            return _Wanted(shape, known, None, 0.0)
        started = time.monotonic()
        lowered = self._programs.lower(shape)
        lower_s = time.monotonic() - started
        fingerprint = program_fingerprint(lowered)
        if self._store is not None:
            self._store.put_record(RECIPE, recipe.digest(), {"program": fingerprint})
        return _Wanted(shape, replace(recipe, program=fingerprint), lowered, lower_s)

    def _recipe(self, shape: StepShape) -> CacheKey:
        """A key that holds the recipe where the program's fingerprint belongs."""
        return self._key(shape, f"recipe {self._programs.recipe(shape)}")

    def _known_key(self, recipe: CacheKey) -> CacheKey | None:
        known = None if self._store is None else self._store.get_record(RECIPE, recipe.digest())
        fingerprint = None if known is None else known.get("program")
        return replace(recipe, program=fingerprint) if isinstance(fingerprint, str) else None

    def _key(self, shape: StepShape, program: str) -> CacheKey:
        programs = self._programs
        options = programs.compiler_options(shape)
        return cache_key(program, shape, programs.devices, programs.mesh_axes, options)

    def _load(
        self, wanted: _Wanted
    ) -> tuple[jax.stages.Compiled | None, ExecutableFacts | None, str]:
        """Tries the entry for any such device, then the one this device built for itself.

        A refusal turns `wanted.key` into the device's own: that is where a rebuilt one goes.
        """
        notes: list[str] = []
        for _ in range(2):
            try:
                compiled, facts, note = self._load_entry(wanted)
            except DeviceRefusal as refusal:
                name = wanted.key.digest()[:12]
                notes.append(f"{name}: this device refused it: {refusal}")
                wanted.key = replace(wanted.key, built_on=_name(self._programs.devices))
                continue
            notes += [note] if note else []
            return compiled, facts, "; ".join(notes)
        return None, None, "; ".join(notes)

    def _load_entry(
        self, wanted: _Wanted
    ) -> tuple[jax.stages.Compiled | None, ExecutableFacts | None, str]:
        found = None if self._store is None else self._store.read(wanted.key.digest())
        if self._store is None or found is None:
            return None, None, ""
        if isinstance(found, Rejected):
            return None, None, found.reason
        try:
            trees = self._programs.trees(wanted.shape)
            compiled = load_executable(found.payload, trees, self._programs.devices)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceRefusal(_first_line(error)) from error
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
            reason = f"can't be unpickled: {_first_line(error)}"
            return None, None, self._store.set_aside(found.key.digest(), reason)
        return compiled, ExecutableFacts.from_json(found.facts), ""

    def _compile(self, wanted: _Wanted) -> tuple[jax.stages.Compiled, ExecutableFacts, str]:
        started = time.monotonic()
        if wanted.lowered is None:
            wanted.lowered = self._programs.lower(wanted.shape)
            wanted.lower_s = time.monotonic() - started
            started = time.monotonic()
        options = cast("Any", dict(self._programs.compiler_options(wanted.shape)))
        compiled = wanted.lowered.compile(compiler_options=options or None)
        compile_s = time.monotonic() - started
        facts = facts_of(compiled, lower_s=wanted.lower_s, compile_s=compile_s)
        if self._store is None:
            return compiled, facts, ""
        payload, _, _ = serialize_executable.serialize(compiled)
        return compiled, facts, self._store.write(wanted.key, payload, facts.to_json())


def load_executable(
    payload: bytes, trees: tuple[Any, Any], devices: list[Any]
) -> jax.stages.Compiled:
    """Unpickles and loads: `payload` is code, and must have been checked before."""
    return serialize_executable.deserialize_and_load(
        payload, *trees, backend=devices[0].client, execution_devices=devices
    )


def _turn_off_jax_cache() -> None:
    """Makes this process compile what it stores, instead of taking it from JAX's own cache.

    What JAX's cache gives for CPUs can be serialised and loaded again, but lacks functions when it
    is run (seen with JAX 0.10.2): an entry made of it would fail while serving.
    """
    config: Any = jax.config  # its type doesn't name the options
    if config.jax_enable_compilation_cache and config.jax_compilation_cache_dir:
        config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it remembers for good that it was on


def _name(devices: list[Any]) -> str:
    """What distinguishes a device that refused from others of its kind: its runtime."""
    return f"{devices[0].device_kind}, runtime {devices[0].client.platform_version}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
