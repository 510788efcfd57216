"""Looking after a compile cache: why a program isn't found, and which ones to remove.

Owns the comparison of cache keys and the choice of what goes. Decides only: opens no files, knows
no clock (times are arguments), loads no JAX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

from buckets.cache_key import CacheKey

# What a person can do about a program that differs: its text says nothing.
_PROGRAM_CAUSES = "the model, an option of the engine, its limits or its own code"


@dataclass(frozen=True, slots=True)
class Difference:
    """One component in which a stored key differs from the wanted one.

    Attributes:
        change: the parts that differ, "jaxlib 0.9.1 -> jaxlib 0.10.2".
    """

    component: str
    change: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a program is found in a cache, or isn't.

    Attributes:
        digest: of the wanted key.
        nearest: digest of the stored entry of this shape that differs least; None where the shape
            was never stored.
        differences: between it and what is wanted; empty where it is just that one.
    """

    digest: str
    nearest: str | None
    differences: tuple[Difference, ...] = ()

    @property
    def is_stored(self) -> bool:
        return self.nearest == self.digest


@dataclass(frozen=True, slots=True)
class Usage:
    """What the choice of entries to remove goes by.

    Attributes:
        num_bytes: of the entry.
        last_use_s: when it was read or written last, as a Unix time.
    """

    shape: str
    num_bytes: int
    last_use_s: float


def explain(wanted: CacheKey, stored: Iterable[CacheKey]) -> Explanation:
    """Compares `wanted` with the stored key of its shape that differs in the fewest components."""
    same_shape = [key for key in stored if key.shape == wanted.shape]
    if not same_shape:
        return Explanation(wanted.digest(), None)
    nearest = min(same_shape, key=lambda key: (len(key.differences(wanted)), key.digest()))
    differences = tuple(
        Difference(name, describe_change(name, getattr(nearest, name), getattr(wanted, name)))
        for name in nearest.differences(wanted)
    )
    return Explanation(wanted.digest(), nearest.digest(), differences)


def describe_change(component: str, stored: str, wanted: str) -> str:
    """The parts of a component that differ, what is stored first."""
    if component == "program":
        return f"{stored[:12]} -> {wanted[:12]} ({_PROGRAM_CAUSES})"
    before, after = (_parts(component, text) for text in (stored, wanted))
    gone = [part for part in before if part not in after]
    new = [part for part in after if part not in before]
    return f"{_listed(gone)} -> {_listed(new)}"


def choose_removals(
    entries: Mapping[str, Usage],
    *,
    kept_shapes: Set[str] = frozenset(),
    unused_since_s: float | None = None,
    max_bytes: int | None = None,
) -> set[str]:
    """Digests to remove: unused since a Unix time, then the longest unused until the rest fits.

    Entries of `kept_shapes` are never chosen, whatever they take: the rest may not fit then.
    """
    removable = {
        digest: usage for digest, usage in entries.items() if usage.shape not in kept_shapes
    }
    chosen: set[str] = set()
    if unused_since_s is not None:
        chosen = {d for d, usage in removable.items() if usage.last_use_s < unused_since_s}
    if max_bytes is not None:
        left = sum(usage.num_bytes for digest, usage in entries.items() if digest not in chosen)
        by_age = sorted(removable.keys() - chosen, key=lambda d: (removable[d].last_use_s, d))
        for digest in by_age:
            if left <= max_bytes:
                break
            chosen.add(digest)
            left -= removable[digest].num_bytes
    return chosen


def _parts(component: str, text: str) -> list[str]:
    """What a component consists of, so that only what differs need be shown."""
    if component == "compiler_options":
        try:
            options = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(options, dict):
            named = cast("dict[str, Any]", options)
            return [f"{name}={json.dumps(value)}" for name, value in sorted(named.items())]
        return [text]
    if component == "flags":
        return _flag_parts(text)
    if component == "host":
        return re.split(r"[\s;]+", text)
    if component in ("versions", "mesh"):
        return text.split(", ")
    return [text]


def _flag_parts(text: str) -> list[str]:
    """Each flag of `NAME=--a --b` lines with the variable it stands in."""
    parts: list[str] = []
    for line in text.splitlines():
        name, _, value = line.partition("=")
        parts += [f"{name}={flag}" for flag in value.split()]
    return parts


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part) or "(nothing)"
