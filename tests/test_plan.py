from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.plan import (
    MAX_DEFAULT_SHAPES,
    InvalidPlan,
    Plan,
    PlanLimits,
    default_plan,
    purpose,
)
from buckets.plan_file import plan_from_yaml, plan_to_yaml
from buckets.shape import StepShape


def shape(tokens: int, seqs: int, pages: int = 8, variant: str = "full") -> StepShape:
    return StepShape(tokens, seqs, pages, seqs, variant)


LIMITS = PlanLimits(max_num_seqs=32, max_num_batched_tokens=256, pages_per_seq=8)


@given(seqs=st.integers(1, 512), extra=st.integers(0, 16384), pages=st.integers(1, 64))
def test_default_plan_serves_any_limits(seqs: int, extra: int, pages: int):
    limits = PlanLimits(seqs, seqs + extra, pages)
    plan = default_plan(limits)
    plan.validate(limits)
    assert len(plan.shapes) <= MAX_DEFAULT_SHAPES
    assert all(s.num_logit_rows == s.num_seqs for s in plan.shapes)
    assert plan.max_num_tokens == limits.max_num_batched_tokens
    assert shape(1, 1, pages) in plan.shapes


def test_default_plan_has_decode_only_and_mixed_shapes():
    pairs = {(s.num_tokens, s.num_seqs) for s in default_plan(LIMITS).shapes}
    assert {(1, 1), (8, 8), (32, 32), (16, 1), (64, 8), (256, 32)} <= pairs


def test_default_plan_refuses_fewer_shapes_than_it_needs():
    with pytest.raises(InvalidPlan, match="at most 2 shapes"):
        default_plan(LIMITS, max_shapes=2)


@given(tokens=st.integers(1, 256), seqs=st.integers(1, 32), rows=st.integers(1, 32))
def test_smallest_covering_is_the_smallest(tokens: int, seqs: int, rows: int):
    plan = default_plan(LIMITS)
    found = plan.smallest_covering(tokens, seqs, rows)
    fits = [
        s
        for s in plan.shapes
        if s.num_tokens >= tokens and s.num_seqs >= seqs and s.num_logit_rows >= rows
    ]
    assert found == min(fits)


def test_smallest_covering_beyond_the_top_is_none():
    plan = default_plan(LIMITS)
    assert plan.smallest_covering(257, 1, 1) is None
    assert plan.smallest_covering(256, 33, 1) is None
    assert plan.smallest_covering(256, 32, 33) is None


def test_other_variants_cover_nothing():
    plan = Plan.of([shape(8, 8, variant="greedy"), shape(16, 8)])
    assert plan.smallest_covering(8, 8, 8) == shape(16, 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([shape(512, 32)], "largest num_tokens of the plan, 512, exceeds 256"),
        ([shape(128, 32)], "largest num_tokens of the plan, 128, falls short of 256"),
        ([shape(256, 64)], "largest num_seqs of the plan, 64, exceeds 32"),
        ([shape(256, 16)], "largest num_seqs of the plan, 16, falls short of 32"),
        ([shape(32, 32), shape(256, 1)], "no full shape covers a step of 256 tokens over 32"),
        ([shape(256, 32, variant="greedy")], "no full shape covers"),
        ([shape(256, 32), shape(1, 1, pages=4)], "pages_per_seq must be 8"),
        ([StepShape(256, 32, 8, 31)], "32 logit rows"),
    ],
)
def test_validate_refuses(shapes: list[StepShape], message: str):
    with pytest.raises(InvalidPlan, match=message):
        Plan.of(shapes).validate(LIMITS)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((), "at least one shape"),
        ((shape(2, 4),), "num_tokens must be at least num_seqs"),
        ((StepShape(1, 0, 1, 1),), "num_seqs must be at least 1"),
        ((shape(2, 1), shape(1, 1)), "sorted and distinct"),
        ((shape(1, 1), shape(1, 1)), "sorted and distinct"),
    ],
)
def test_senseless_plans_are_refused(shapes: tuple[StepShape, ...], message: str):
    with pytest.raises(InvalidPlan, match=message):
        Plan(shapes)


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (8, 4, 1)])
def test_senseless_limits_are_refused(limits: tuple[int, int, int]):
    with pytest.raises(InvalidPlan):
        PlanLimits(*limits)


def test_yaml_round_trip():
    plan = Plan.of([*default_plan(LIMITS).shapes, shape(8, 8, variant="greedy")])
    text = plan_to_yaml(plan)
    assert text.startswith("schema_version: 2\n")
    assert plan_from_yaml(text) == plan


def test_compiler_options_round_trip_and_a_shape_overrides_the_plan():
    first, second = shape(1, 1), shape(32, 32)
    common = {"xla_embed_ir_in_executable": True, "xla_llvm_disable_expensive_passes": False}
    own = {second: {"xla_llvm_disable_expensive_passes": True}}
    plan = plan_from_yaml(plan_to_yaml(Plan((first, second), common, own)))
    assert plan == Plan((first, second), common, own)
    assert plan.compiler_options(first) == common
    assert plan.compiler_options(second) == common | own[second]


def test_a_plan_of_the_first_release_is_read(repo_root: Path):
    plan = plan_from_yaml((repo_root / "tests/fixtures/plan_1.yaml").read_text())
    assert plan == default_plan(LIMITS)


def test_purposes():
    named = {purpose(s) for s in (shape(1, 1), shape(32, 32))}
    assert named == {"decode"}
    assert purpose(shape(16, 1)) == "prefill"
    assert purpose(shape(16, 8)) == "mixed"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan whose top is exactly `LIMITS`."""
    pair = st.tuples(st.integers(1, 256), st.integers(1, 32)).filter(lambda p: p[0] >= p[1])
    some = draw(st.lists(pair, max_size=12))
    return Plan.of([shape(256, 32), *(shape(*p) for p in some)])


@given(plan=plans(), tokens=st.integers(1, 256), seqs=st.integers(1, 32))
def test_any_admissible_step_has_exactly_one_smallest_covering_shape(
    plan: Plan, tokens: int, seqs: int
):
    plan.validate(LIMITS)
    seqs = min(seqs, tokens)
    found = plan.smallest_covering(tokens, seqs, seqs)
    assert found is not None
    assert found.num_tokens >= tokens
    assert found.num_seqs >= seqs
    for other in plan.shapes:
        if other != found and other.num_tokens >= tokens and other.num_seqs >= seqs:
            assert found < other


@given(seqs=st.integers(1, 7), budget=st.integers(7, 20000))
def test_the_largest_bucket_is_the_budget_whatever_its_factors(seqs: int, budget: int):
    """C2, C3, C5: never padded past the budget, and few sequences have shapes of their own."""
    plan = default_plan(PlanLimits(seqs, budget, 4))
    assert max(s.num_tokens for s in plan.shapes) == budget
    assert {s.num_seqs for s in plan.shapes} <= set(range(1, seqs + 1))


ROW = "{num_tokens: 1, num_seqs: 1, pages_per_seq: 1, num_logit_rows: 1}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema_version: 3\nshapes: []", "schema_version must be 1 to 2, got 3 .a newer release"),
        (f"shapes: [{ROW}]", "schema_version must be 1 to 2, got None"),
        (f"schema_version: true\nshapes: [{ROW}]", "schema_version must be 1 to 2, got True"),
        (f"schema_version: 1\ncompiler_options: {{}}\nshapes: [{ROW}]", "'compiler_options'"),
        ("schema_version: 1\nshape: []", "unknown key 'shape'; nearest known: shapes"),
        ("schema_version: 1\nshapes: 3", "shapes must be a list, got 3"),
        ("schema_version: 1\nshapes: [{num_token: 1}]", "'num_token'; nearest known: num_tokens"),
        ("schema_version: 1\nshapes: [{num_tokens: x}]", r"shapes\[0\].num_tokens must be a whole"),
        ("schema_version: 1\nshapes: [{num_tokens: true}]", "whole number, got True"),
        (f"schema_version: 1\nshapes: [{ROW}, {ROW}]", "distinct"),
        (f"schema_version: 2\ncompiler_options: 3\nshapes: [{ROW}]", "compiler_options must be a"),
        (f"schema_version: 2\ncompiler_options: {{a: []}}\nshapes: [{ROW}]", "options.a must be"),
        ("schema_version: 1\nshapes: []", "at least one shape"),
        ("schema_version: 1\nshapes: [7]", r"shapes\[0\] must be a mapping, got int"),
        ("- 1", "a plan file must be a mapping, got list"),
        ("a: [", "a plan file must be YAML"),
    ],
)
def test_yaml_refusals_name_what_is_wrong(text: str, message: str):
    with pytest.raises(InvalidPlan, match=message):
        plan_from_yaml(text)
