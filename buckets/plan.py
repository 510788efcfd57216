"""`Plan`: the set of compiled shapes an engine serves with, its limits, checks and file format.

Owns which shapes exist and which one covers a given step. Doesn't know what a shape costs, how
it is compiled, or anything of requests, pages in use and devices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import cast

import yaml

from buckets.shape import StepShape

SCHEMA_VERSION = 1
MAX_DEFAULT_SHAPES = 24
_LADDER_GROWTHS = ((2, 4), (4, 4), (4, 8), (8, 16), (16, 64), (64, 1024))
_SHAPE_KEYS = tuple(f.name for f in fields(StepShape))
_FILE_KEYS = ("schema_version", "shapes")


class InvalidPlan(ValueError):
    """A plan that can't serve its limits, or a plan file that can't be read; says which part."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The budgets a plan must meet exactly.

    Attributes:
        max_num_seqs: rows of the largest step.
        max_num_batched_tokens: tokens of the largest step, at least `max_num_seqs`.
        pages_per_seq: page-table width, `ceil(max_model_len / page_size)`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pages_per_seq: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value: int = getattr(self, field.name)
            if value < 1:
                raise InvalidPlan(f"{field.name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidPlan(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )


@dataclass(frozen=True)
class Plan:
    """An immutable, sorted set of step shapes; raises `InvalidPlan` when a shape makes no sense."""

    shapes: tuple[StepShape, ...]

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InvalidPlan("a plan needs at least one shape")
        for shape in self.shapes:
            _check_shape(shape)
        if list(self.shapes) != sorted(set(self.shapes)):
            raise InvalidPlan("the shapes of a plan must be sorted and distinct")

    @classmethod
    def of(cls, shapes: Iterable[StepShape]) -> Plan:
        """Builds a plan from shapes in any order, duplicates dropped."""
        return cls(tuple(sorted(set(shapes))))

    @cached_property
    def full_shapes(self) -> tuple[StepShape, ...]:
        """The shapes whose program can run every row, smallest first."""
        return tuple(shape for shape in self.shapes if shape.variant == "full")

    @cached_property
    def max_num_tokens(self) -> int:
        return max(shape.num_tokens for shape in self.shapes)

    @cached_property
    def max_num_seqs(self) -> int:
        return max(shape.num_seqs for shape in self.shapes)

    @cached_property
    def pages_per_seq(self) -> int:
        return max(shape.pages_per_seq for shape in self.shapes)

    def smallest_covering(
        self, num_tokens: int, num_seqs: int, num_logit_rows: int
    ) -> StepShape | None:
        """The full shape with the fewest tokens, then rows, that holds a step; None if none."""
        for shape in self.full_shapes:
            if (
                shape.num_tokens >= num_tokens
                and shape.num_seqs >= num_seqs
                and shape.num_logit_rows >= num_logit_rows
            ):
                return shape
        return None

    def validate(self, limits: PlanLimits) -> None:
        """Raises `InvalidPlan` unless the plan's top is exactly `limits` and covers all of it.

        A step is admissible with `1 <= seqs <= max_num_seqs` and
        `seqs <= tokens <= max_num_batched_tokens`; one full shape at the very top covers them all.
        """
        tops = (
            ("num_tokens", self.max_num_tokens, limits.max_num_batched_tokens),
            ("num_seqs", self.max_num_seqs, limits.max_num_seqs),
        )
        for name, top, budget in tops:
            if top != budget:
                verb = "exceeds" if top > budget else "falls short of"
                raise InvalidPlan(f"the largest {name} of the plan, {top}, {verb} {budget}")
        for shape in self.shapes:
            if shape.pages_per_seq != limits.pages_per_seq:
                raise InvalidPlan(f"pages_per_seq must be {limits.pages_per_seq} in ({shape})")
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        if self.smallest_covering(tokens, seqs, seqs) is None:
            raise InvalidPlan(
                f"no full shape covers a step of {tokens} tokens over {seqs} sequences "
                f"with {seqs} logit rows"
            )


def default_plan(limits: PlanLimits, max_shapes: int = MAX_DEFAULT_SHAPES) -> Plan:
    """A plan from two short geometric ladders, decode-only shapes and mixed shapes.

    Decode-only shapes have one token per row. Mixed shapes cross a token ladder with few, some
    and all rows. The ladders get coarser until at most `max_shapes` shapes are left.
    """
    for seq_growth, token_growth in _LADDER_GROWTHS:
        shapes = _cross(limits, seq_growth, token_growth)
        if len(shapes) <= max_shapes:
            return Plan.of(shapes)
    raise InvalidPlan(f"no default plan of at most {max_shapes} shapes covers {limits}")


def plan_to_yaml(plan: Plan) -> str:
    """The plan as YAML text, `schema_version` first."""
    content = {"schema_version": SCHEMA_VERSION, "shapes": [asdict(s) for s in plan.shapes]}
    # The stub of safe_dump has one parameter without a type.
    return yaml.safe_dump(content, sort_keys=False)  # pyright: ignore[reportUnknownMemberType]


def plan_from_yaml(text: str) -> Plan:
    """Reads `plan_to_yaml`'s format; raises `InvalidPlan` naming the key or line that is wrong."""
    try:
        content: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidPlan(f"a plan file must be YAML: {error}") from error
    top = _mapping(content, "a plan file", _FILE_KEYS)
    if top.get("schema_version") != SCHEMA_VERSION:
        raise InvalidPlan(
            f"schema_version must be {SCHEMA_VERSION}, got {top.get('schema_version')!r}"
        )
    entries = top.get("shapes")
    if not isinstance(entries, list):
        raise InvalidPlan(f"shapes must be a list, got {entries!r}")
    shapes = [_shape(entry, i) for i, entry in enumerate(cast("list[object]", entries))]
    if len(set(shapes)) != len(shapes):
        raise InvalidPlan("shapes must be distinct")
    return Plan.of(shapes)


def _check_shape(shape: StepShape) -> None:
    for name in ("num_tokens", "num_seqs", "pages_per_seq", "num_logit_rows"):
        if getattr(shape, name) < 1:
            raise InvalidPlan(f"{name} must be at least 1 in ({shape})")
    if shape.num_tokens < shape.num_seqs:
        raise InvalidPlan(f"num_tokens must be at least num_seqs in ({shape})")


def _cross(limits: PlanLimits, seq_growth: int, token_growth: int) -> set[StepShape]:
    top_seqs, top_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    pairs = {(seqs, seqs) for seqs in _ladder(1, top_seqs, seq_growth)}
    for tokens in _ladder(16, top_tokens, token_growth):
        rows = {1, min(8, top_seqs), top_seqs}
        pairs |= {(tokens, seqs) for seqs in rows if seqs <= tokens}
    return {StepShape(t, b, limits.pages_per_seq, b) for t, b in pairs}


def _ladder(first: int, top: int, growth: int) -> list[int]:
    """Geometric rungs from `first` that end at `top` exactly; a rung too near to it is left out."""
    rungs: list[int] = []
    rung = first
    while 4 * rung <= 3 * top:
        rungs.append(rung)
        rung *= growth
    return [*rungs, top]


def _shape(entry: object, index: int) -> StepShape:
    where = f"shapes[{index}]"
    given = _mapping(entry, where, _SHAPE_KEYS)
    numbers: dict[str, int] = {}
    for key in _SHAPE_KEYS[:4]:
        value = given.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidPlan(f"{where}.{key} must be a whole number, got {value!r}")
        numbers[key] = value
    variant = given.get("variant", "full")
    if not isinstance(variant, str):
        raise InvalidPlan(f"{where}.variant must be text, got {variant!r}")
    return StepShape(**numbers, variant=variant)


def _mapping(content: object, where: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(content, dict):
        raise InvalidPlan(f"{where} must be a mapping, got {type(content).__name__}")
    mapping = cast("dict[object, object]", content)
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise InvalidPlan(f"{where} has the unknown key {key!r}; nearest known: {near[0]}")
    return cast("Mapping[str, object]", mapping)
