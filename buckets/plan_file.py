"""The plan file: a small YAML file of a plan, and of what is known of its shapes on a device.

Owns the format and its versions. A reader reads its own schema version and all older ones, where
keys that came later have their defaults; a newer one is refused by its number, because a key
nobody here knows may decide what is served. Opens no file: text in, text out.

    schema_version: 2
    compiler_options: {xla_a: true}          # of every shape; optional
    shapes:
    - {num_tokens: 8, num_seqs: 8, pages_per_seq: 256, num_logit_rows: 8}  # decode
    - {num_tokens: 64, num_seqs: 8, pages_per_seq: 256, num_logit_rows: 8,
       variant: full, compiler_options: {xla_a: false}}   # the last two optional
    device_profile: {...}                    # optional, see `device_profile.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

import yaml

from buckets.device_profile import DeviceProfile, profile_to_yaml
from buckets.plan import InvalidPlan, Options, Plan, purpose
from buckets.plan_content import SHAPE_KEYS, as_list, as_mapping, as_shape, parse_yaml
from buckets.shape import StepShape

SCHEMA_VERSION = 2
_KEYS_OF_VERSION = {
    1: (("schema_version", "shapes"), SHAPE_KEYS),
    2: (
        ("schema_version", "compiler_options", "shapes", "device_profile"),
        (*SHAPE_KEYS, "compiler_options"),
    ),
}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file holds."""

    plan: Plan
    profile: DeviceProfile | None = None


def plan_to_yaml(plan: Plan, profile: DeviceProfile | None = None) -> str:
    """The text of a plan file: a line per shape, with its purpose as a comment."""
    own = plan.shape_options
    lines = [f"schema_version: {SCHEMA_VERSION}"]
    if plan.options:
        lines.append(f"compiler_options: {_flow(dict(plan.options))}")
    lines.append("shapes:")
    for shape in plan.shapes:
        row: dict[str, object] = asdict(shape)
        if shape.variant == "full":
            del row["variant"]
        if shape in own:
            row["compiler_options"] = dict(own[shape])
        lines.append(f"- {_flow(row)}  # {purpose(shape)}")
    if profile is not None:
        lines.append("device_profile:")
        lines += [f"  {line}" for line in profile_to_yaml(profile).splitlines()]
    return "\n".join(lines) + "\n"


def with_profile(text: str, profile: DeviceProfile) -> str:
    """The plan file `text` with this profile in it; what a person wrote stays as it is.

    Facts that the file has of the same target and this profile lacks stay too.
    """
    content = plan_file_from_yaml(text)
    if content.profile is not None:
        profile = content.profile.updated(profile)
    lines = text.splitlines()
    own = [i for i, line in enumerate(lines) if line.startswith("device_profile:")]
    if own:
        rest = lines[own[0] + 1 :]
        while rest and rest[0][:1] in ("", " ", "-"):
            rest.pop(0)
        lines = lines[: own[0]] + rest
    written = plan_to_yaml(content.plan, profile)
    block = written[written.index("device_profile:") :]
    patched = "\n".join(lines) + "\n" + block
    try:
        is_same = plan_file_from_yaml(patched) == PlanFile(content.plan, profile)
    except InvalidPlan:  # an older schema version has no profiles
        is_same = False
    return patched if is_same else written


def plan_file_from_yaml(text: str) -> PlanFile:
    """Reads a plan file; raises `InvalidPlan` naming the key or line that is wrong."""
    content = parse_yaml(text, "a plan file")
    version = as_mapping(content, "a plan file").get("schema_version")
    known = _KEYS_OF_VERSION.get(version) if type(version) is int else None
    if known is None:
        raise InvalidPlan(
            f"schema_version must be 1 to {SCHEMA_VERSION}, got {version!r} "
            "(a newer release may have written this file)"
        )
    file_keys, row_keys = known
    top = as_mapping(content, "a plan file", file_keys)
    shapes: list[StepShape] = []
    own: dict[StepShape, Options] = {}
    for i, entry in enumerate(as_list(top.get("shapes"), "shapes")):
        where = f"shapes[{i}]"
        row = as_mapping(entry, where, row_keys)
        shapes.append(as_shape(row, where))
        if options := _options(row, f"{where}.compiler_options"):
            own[shapes[-1]] = options
    if len(set(shapes)) != len(shapes):
        raise InvalidPlan("shapes must be distinct")
    profile = top.get("device_profile")
    return PlanFile(
        Plan(tuple(sorted(shapes)), _options(top, "compiler_options"), own),
        None if profile is None else DeviceProfile.from_json(profile, "device_profile"),
    )


def plan_from_yaml(text: str) -> Plan:
    """The plan alone of a plan file."""
    return plan_file_from_yaml(text).plan


def _options(mapping: Mapping[str, object], where: str) -> Options:
    given = mapping.get("compiler_options")
    options = as_mapping({} if given is None else given, where)
    for name, value in options.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidPlan(f"{where}.{name} must be text, a number or a boolean, got {value!r}")
    return cast("Options", options)


def _flow(content: Mapping[str, object]) -> str:
    """A mapping on one line."""
    # The stub of safe_dump has one parameter without a type.
    text = yaml.safe_dump(  # pyright: ignore[reportUnknownMemberType]
        dict(content), sort_keys=False, default_flow_style=True, width=10_000
    )
    return text.strip()
