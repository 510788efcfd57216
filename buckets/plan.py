"""`Plan`: the set of compiled shapes an engine serves with, its limits and checks.

Owns which shapes exist, which one covers a given step, and what the compiler is told for each.
Doesn't know what a shape costs, how it is compiled or written to a file (`plan_file.py`), or
anything of requests, pages in use and devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise

from buckets.shape import StepShape

MAX_DEFAULT_SHAPES = 24
# Rows between two decode shapes that are worth a shape more.
_WIDE_GAP = 32
_LADDER_GROWTHS = ((2, 4), (4, 4), (4, 8), (8, 16), (16, 64), (64, 1024))

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
    and all rows. The ladders get coarser until at most `max_shapes` shapes are left; what is left
    over goes to decode shapes in the middle of the widest gaps.
    """
    for seq_growth, token_growth in _LADDER_GROWTHS:
        shapes = _cross(limits, seq_growth, token_growth)
        if len(shapes) <= max_shapes:
            return Plan.of(shapes | _between(limits, seq_growth, max_shapes - len(shapes)))
    raise InvalidPlan(f"no default plan of at most {max_shapes} shapes covers {limits}")


def purpose(shape: StepShape) -> str:
    """What a shape is for: "decode" (one token a row), "prefill" (one row) or "mixed"."""
    if shape.num_tokens == shape.num_seqs:
        return "decode"
    return "prefill" if shape.num_seqs == 1 else "mixed"


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


def _between(limits: PlanLimits, seq_growth: int, count: int) -> set[StepShape]:
    """At most `count` decode shapes between rungs that are far apart, the widest gaps first."""
    rungs = _ladder(1, limits.max_num_seqs, seq_growth)
    gaps = sorted(pairwise(rungs), key=lambda gap: gap[0] - gap[1])
    middles = [(low + high) // 2 for low, high in gaps if high - low >= _WIDE_GAP]
    return {StepShape(n, n, limits.pages_per_seq, n) for n in middles[:count]}


def _ladder(first: int, top: int, growth: int) -> list[int]:
    """Geometric rungs from `first` that end at `top` exactly; a rung too near to it is left out."""
    rungs: list[int] = []
    rung = first
    while 4 * rung <= 3 * top:
        rungs.append(rung)
        rung *= growth
    return [*rungs, top]
