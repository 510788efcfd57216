"""`Plan`: the set of compiled shapes an engine serves with, its limits, checks and file format.

Owns which shapes exist and which one covers a given step. Doesn't know what a shape costs, how
it is compiled, or anything of requests, pages in use and devices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import cast

import yaml

from buckets.shape import StepShape

# Version 1 had no compiler options. A reader takes its own and older versions, refuses newer ones.
SCHEMA_VERSION = 2
MAX_DEFAULT_SHAPES = 24
_LADDER_GROWTHS = ((2, 4), (4, 4), (4, 8), (8, 16), (16, 64), (64, 1024))
_SHAPE_KEYS = tuple(f.name for f in fields(StepShape))
_FILE_KEYS = ("schema_version", "compiler_options", "shapes")

Option = str | int | float | bool
Options = Mapping[str, Option]


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
        for budget in fields(self):
            value: int = getattr(self, budget.name)
            if value < 1:
                raise InvalidPlan(f"{budget.name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidPlan(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )


@dataclass(frozen=True)
class Plan:
    """An immutable, sorted set of step shapes; raises `InvalidPlan` when a shape makes no sense.

    Attributes:
        options: what the compiler is told for every shape, by option name.
        shape_options: what it is told for single shapes; comes before `options`.
    """

    shapes: tuple[StepShape, ...]
    options: Options = field(default_factory=dict[str, Option])
    shape_options: Mapping[StepShape, Options] = field(default_factory=dict[StepShape, Options])

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InvalidPlan("a plan needs at least one shape")
        for shape in self.shapes:
            _check_shape(shape)
        if list(self.shapes) != sorted(set(self.shapes)):
            raise InvalidPlan("the shapes of a plan must be sorted and distinct")

    def compiler_options(self, shape: StepShape) -> Options:
        """What the compiler is told for `shape`."""
        return {**self.options, **self.shape_options.get(shape, {})}

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


def purpose(shape: StepShape) -> str:
    """What a shape is for: "decode" (one token a row), "prefill" (one row) or "mixed"."""
    if shape.num_tokens == shape.num_seqs:
        return "decode"
    return "prefill" if shape.num_seqs == 1 else "mixed"


def plan_to_yaml(plan: Plan) -> str:
    """The plan as a small file that a person can edit."""
    shapes: list[dict[str, object]] = []
    for shape in plan.shapes:
        entry: dict[str, object] = asdict(shape)
        if shape in plan.shape_options:
            entry["compiler_options"] = dict(plan.shape_options[shape])
        shapes.append(entry)
    content: dict[str, object] = {"schema_version": SCHEMA_VERSION}
    if plan.options:
        content["compiler_options"] = dict(plan.options)
    content["shapes"] = shapes
    # The stub of safe_dump has one parameter without a type.
    return yaml.safe_dump(content, sort_keys=False)  # pyright: ignore[reportUnknownMemberType]


def plan_from_yaml(text: str) -> Plan:
    """Reads `plan_to_yaml`'s format; raises `InvalidPlan` naming the key or line that is wrong."""
    try:
        content: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidPlan(f"a plan file must be YAML: {error}") from error
    top = _mapping(content, "a plan file", _FILE_KEYS)
    version = top.get("schema_version")
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise InvalidPlan(
            f"schema_version must be 1 to {SCHEMA_VERSION}, got {version!r} "
            "(a newer release may have written this file)"
        )
    entries = top.get("shapes")
    if not isinstance(entries, list):
        raise InvalidPlan(f"shapes must be a list, got {entries!r}")
    shape_options: dict[StepShape, Options] = {}
    shapes: list[StepShape] = []
    for i, entry in enumerate(cast("list[object]", entries)):
        shape, options = _shape(entry, i)
        shapes.append(shape)
        if options:
            shape_options[shape] = options
    if len(set(shapes)) != len(shapes):
        raise InvalidPlan("shapes must be distinct")
    common = _options(top.get("compiler_options"), "compiler_options")
    return Plan(tuple(sorted(shapes)), common, shape_options)


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


def _shape(entry: object, index: int) -> tuple[StepShape, Options]:
    where = f"shapes[{index}]"
    given = _mapping(entry, where, (*_SHAPE_KEYS, "compiler_options"))
    numbers: dict[str, int] = {}
    for key in _SHAPE_KEYS[:4]:
        value = given.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidPlan(f"{where}.{key} must be a whole number, got {value!r}")
        numbers[key] = value
    variant = given.get("variant", "full")
    if not isinstance(variant, str):
        raise InvalidPlan(f"{where}.variant must be text, got {variant!r}")
    options = _options(given.get("compiler_options"), f"{where}.compiler_options")
    return StepShape(**numbers, variant=variant), options


def _options(given: object, where: str) -> Options:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidPlan(f"{where} must be a mapping, got {given!r}")
    options: dict[str, Option] = {}
    for name, value in cast("dict[object, object]", given).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
            raise InvalidPlan(f"{where}.{name} must be text, a number or a truth value")
        options[name] = value
    return options


def _mapping(content: object, where: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(content, dict):
        raise InvalidPlan(f"{where} must be a mapping, got {type(content).__name__}")
    mapping = cast("dict[object, object]", content)
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise InvalidPlan(f"{where} has the unknown key {key!r}; nearest known: {near[0]}")
    return cast("Mapping[str, object]", mapping)
