"""`CacheKey`: everything that decides which executable a shape gets, one component per cause.

Owns the names of the components and the digest that names an entry. Computes none of them; loads
no JAX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Two programs with equal keys are the same executable; a difference has a name.

    Attributes:
        program: SHA-256 of the canonical StableHLO (no source locations, kernels' payloads
            included).
        shape: the plan entry, as `str(StepShape)`.
        devices: kind, number and arrangement ("TPU v6 lite x 8, 2x4").
        mesh: axes and sizes ("tensor=8").
        compiler_options: the options of this one program, as JSON with sorted keys.
        versions: of jax, jaxlib and, for TPUs, libtpu.
        flags: environment variables the compiler reads, as sorted `NAME=value` lines.
        host: the processor's features for CPU programs; empty for TPUs.
        built_on: empty for a program that any such device should load; the device's own name where
            one refused that and compiled for itself.
    """

    program: str
    shape: str
    devices: str
    mesh: str
    compiler_options: str
    versions: str
    flags: str
    host: str
    built_on: str = ""

    def digest(self) -> str:
        """64 hexadecimal digits that name the entry."""
        digest = hashlib.sha256()
        for name, value in asdict(self).items():
            digest.update(f"{name}:{len(value)}:{value};".encode())
        return digest.hexdigest()

    def differences(self, other: CacheKey) -> tuple[str, ...]:
        """Names of the components in which two keys differ."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> CacheKey:
        """Reads `to_json`'s form; `ValueError` names a component that is missing or no text."""
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(content) - set(names)):
            raise ValueError(f"a cache key has no component {unknown[0]!r}")
        values: dict[str, str] = {}
        for name in names:
            value = content.get(name)
            if not isinstance(value, str):
                raise ValueError(f"component {name} of a cache key must be text, got {value!r}")
            values[name] = value
        return cls(**values)
