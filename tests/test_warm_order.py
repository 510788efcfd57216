"""The order of warming: what a server opens with, and what comes next."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.plan import Plan, PlanLimits, default_plan
from buckets.shape import StepShape
from buckets.warm_order import opening_shapes, warm_order


def shape(tokens: int, seqs: int, variant: str = "full") -> StepShape:
    return StepShape(tokens, seqs, 8, seqs, variant)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    seqs = draw(st.integers(1, 8))
    tokens = draw(st.integers(seqs, 40))
    pairs = [(t, b) for b in range(1, seqs + 1) for t in range(b, tokens + 1)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=10))
    return Plan.of(shape(t, b) for t, b in [*chosen, (tokens, seqs)])


@given(plans())
def test_every_prefix_from_the_opening_on_can_serve(plan: Plan) -> None:
    order = warm_order(plan)
    assert sorted(order) == list(plan.shapes), "each shape once"
    opening = opening_shapes(plan)
    assert order[: len(opening)] == opening
    assert len(opening) <= 2
    limits = PlanLimits(plan.max_num_seqs, plan.max_num_tokens, plan.pages_per_seq)
    for prefix in list(accumulate(((s,) for s in order), lambda a, b: a + b))[len(opening) - 1 :]:
        Plan.of(prefix).validate(limits)


def test_it_opens_with_the_top_and_the_decode_of_all() -> None:
    plan = default_plan(PlanLimits(256, 2048, 256))
    opening = opening_shapes(plan)
    assert [(s.num_tokens, s.num_seqs) for s in opening] == [(2048, 256), (256, 256)]
    assert opening_shapes(Plan.of([shape(8, 8)])) == (shape(8, 8),)


def test_what_saves_most_comes_next() -> None:
    """A lone decode at 64 tokens costs five times its own; a prompt of 60 hardly anything."""
    plan = Plan.of([shape(64, 8), shape(8, 8), shape(60, 8), shape(1, 1), shape(32, 8)])
    names = [(s.num_tokens, s.num_seqs) for s in warm_order(plan)]
    assert names[:2] == [(64, 8), (8, 8)]
    assert names.index((1, 1)) < names.index((60, 8))
    assert names.index((32, 8)) < names.index((60, 8))


def test_variants_are_no_way_out_for_full_steps() -> None:
    plan = Plan.of([shape(64, 8), shape(8, 8), shape(8, 8, "greedy")])
    assert opening_shapes(plan) == (shape(64, 8), shape(8, 8))
    assert warm_order(plan)[-1] == shape(8, 8, "greedy")


@pytest.mark.parametrize("count", [200])
def test_a_plan_of_many_shapes_is_ordered_at_once(count: int) -> None:
    plan = Plan.of(shape(8 * n, min(n, 8)) for n in range(1, count + 1))
    assert len(warm_order(plan)) == count
