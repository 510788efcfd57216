"""`DeviceProfile`: what is known of each compiled shape on one kind of device.

Owns the facts per shape (from the compiler at warm-up, from a device where there was one), their
file format and how newer facts join older ones. Measures, predicts and judges nothing; a fact
that nobody found out is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import yaml

from buckets.plan import InvalidPlan
from buckets.plan_content import (
    SHAPE_KEYS,
    as_amount,
    as_list,
    as_mapping,
    as_shape,
    as_text,
    as_whole,
    parse_yaml,
)
from buckets.shape import StepShape

PROFILE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """What the facts hold for; other models, chips, meshes and versions have other facts.

    Attributes:
        model: the model and the options that decide its programs, as text.
        chip: as `kernels.chips` names it ("v6e"), or the device kind ("cpu").
        mesh: axes and sizes ("tensor=8").
        versions: of jax, jaxlib and, for TPUs, libtpu.
    """

    model: str
    chip: str
    mesh: str
    versions: str


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """Facts about the executable of one shape; None where unknown. Bytes are per device.

    Attributes:
        compile_s: seconds in the compiler.
        hbm_bytes: all a run needs: arguments, results, temporaries, code.
        temp_bytes: temporaries alone.
        code_bytes: the program itself.
        flops, bytes_accessed: of one run, repeated bodies counted as often as they run.
        estimated_step_s: from the compiler's figures for the target.
        roofline_step_s: the least the chip's peaks allow.
        measured_step_s: median of runs on a device.
        num_measured: how many runs that median is of.
    """

    compile_s: float | None = None
    hbm_bytes: int | None = None
    temp_bytes: int | None = None
    code_bytes: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    estimated_step_s: float | None = None
    roofline_step_s: float | None = None
    measured_step_s: float | None = None
    num_measured: int | None = None

    def updated(self, newer: ShapeProfile) -> ShapeProfile:
        """These facts, replaced by those that `newer` knows."""
        return replace(self, **newer.known())

    def known(self) -> dict[str, Any]:
        """The facts that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_WHOLE = ("hbm_bytes", "temp_bytes", "code_bytes", "num_measured")
_FACTS = tuple(f.name for f in fields(ShapeProfile))
_TARGET = tuple(f.name for f in fields(ProfileTarget))
_NOTHING = ShapeProfile()


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Facts per shape for one target."""

    target: ProfileTarget
    shapes: Mapping[StepShape, ShapeProfile] = field(default_factory=dict[StepShape, ShapeProfile])

    def of(self, shape: StepShape) -> ShapeProfile:
        """What is known of `shape`; all None for one that nobody looked at."""
        return self.shapes.get(shape, _NOTHING)

    def updated(self, newer: DeviceProfile) -> DeviceProfile:
        """Joined with newer facts; those of another target replace everything."""
        if newer.target != self.target:
            return newer
        shapes = dict(self.shapes)
        for shape, facts in newer.shapes.items():
            shapes[shape] = self.of(shape).updated(facts)
        return DeviceProfile(self.target, shapes)

    def to_json(self) -> dict[str, Any]:
        """Plain content, `schema_version` first; unknown facts are left out."""
        rows = [asdict(shape) | facts.known() for shape, facts in sorted(self.shapes.items())]
        return {"schema_version": PROFILE_SCHEMA_VERSION, **asdict(self.target), "shapes": rows}

    @classmethod
    def from_json(cls, content: object, where: str = "a device profile") -> DeviceProfile:
        """Reads `to_json`'s form; raises `InvalidPlan` naming the key that is wrong.

        Older schema versions are read, newer ones refused.
        """
        top = as_mapping(content, where, ("schema_version", *_TARGET, "shapes"))
        version = top.get("schema_version")
        if version != PROFILE_SCHEMA_VERSION:
            limit = f"must be {PROFILE_SCHEMA_VERSION} for this release"
            raise InvalidPlan(f"schema_version of {where} {limit}, got {version!r}")
        target = ProfileTarget(**{name: as_text(top.get(name), name) for name in _TARGET})
        shapes: dict[StepShape, ShapeProfile] = {}
        for i, entry in enumerate(as_list(top.get("shapes", []), f"shapes of {where}")):
            at = f"shapes[{i}] of {where}"
            row = as_mapping(entry, at, (*SHAPE_KEYS, *_FACTS))
            shape = as_shape(row, at)
            if shape in shapes:
                raise InvalidPlan(f"{at} repeats ({shape})")
            shapes[shape] = _facts(row, at)
        return cls(target, shapes)


def profile_to_yaml(profile: DeviceProfile) -> str:
    """A file of its own; JSON readers of `to_json` read the same content."""
    # The stub of safe_dump has one parameter without a type.
    return yaml.safe_dump(  # pyright: ignore[reportUnknownMemberType]
        profile.to_json(), sort_keys=False, default_flow_style=None, width=1000
    )


def profile_from_yaml(text: str) -> DeviceProfile:
    """Reads `profile_to_yaml`'s form, or the same as JSON."""
    return DeviceProfile.from_json(parse_yaml(text, "a device profile"))


def _facts(row: Mapping[str, object], where: str) -> ShapeProfile:
    found: dict[str, Any] = {}
    for name in _FACTS:
        value = row.get(name)
        if value is None:
            continue
        amount = as_amount(value, f"{where}.{name}")
        found[name] = as_whole(value, f"{where}.{name}") if name in _WHOLE else amount
    return ShapeProfile(**found)
