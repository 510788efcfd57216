import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.plan import Plan, PlanLimits, default_plan
from buckets.shape import StepShape
from tpu_engine.scheduler.choice import (
    Choice,
    ExecutedTokensCost,
    Prefill,
    choose_step,
    share_tokens,
)

PLAN = default_plan(PlanLimits(32, 256, 8))
COST = ExecutedTokensCost()


def prefills(*lefts: int) -> list[Prefill]:
    return [Prefill(i, left, left) for i, left in enumerate(lefts)]


def choose(num_decodes: int, *lefts: int, plan: Plan = PLAN) -> Choice | None:
    return choose_step(plan, num_decodes, prefills(*lefts), COST, 16)


def pair(choice: Choice | None) -> tuple[int, int]:
    assert choice is not None
    return choice.shape.num_tokens, choice.shape.num_seqs


def test_no_work_no_step():
    assert choose(0) is None


@pytest.mark.parametrize(("decodes", "tokens"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (32, 32)])
def test_decodes_alone_run_at_the_decode_shape(decodes: int, tokens: int):
    assert pair(choose(decodes)) == (tokens, tokens)


def test_chunks_are_cut_to_the_bucket_not_padded():
    choice = choose(3, 500)
    assert pair(choice) == (256, 8)
    assert choice is not None
    assert choice.grants == (253,)
    choice = choose(0, 70)
    assert pair(choice) == (64, 1)
    assert choice is not None
    assert choice.grants == (64,)


def test_prompts_get_their_floor_beside_many_decodes():
    """31 decodes leave 1 token in the 32-shape: a prompt of 20 must not trickle through it."""
    choice = choose(31, 20)
    assert pair(choice) == (64, 32)
    assert choice is not None
    assert choice.grants == (20,)


def test_one_prompt_token_runs_although_decodes_alone_would_score_better():
    choice = choose(8, 1)
    assert choice is not None
    assert choice.grants == (1,)


def test_two_prompts_are_never_squeezed_into_a_shape_with_one_row():
    choice = choose(0, 1000, 10)
    assert choice is not None
    assert choice.grants == (246, 10)
    assert choice.shape.num_seqs > 1


def test_every_decode_has_a_row_even_without_room_for_prompts():
    plan = Plan.of([StepShape(4, 4, 8, 4)])
    choice = choose(4, 100, plan=plan)
    assert choice is not None
    assert choice.grants == (0,)


def test_logit_rows_bound_the_rows():
    plan = Plan.of([StepShape(64, 8, 8, 2), StepShape(256, 8, 8, 8)])
    assert pair(choose(3, plan=plan)) == (256, 8)


def test_cost_decides_between_shapes():
    free = choose_step(PLAN, 0, prefills(70), lambda _: 1.0, 16)
    assert free is not None
    assert free.grants == (70,)


def share(lefts: list[int], tokens: int, rows: int) -> list[int]:
    order = sorted(range(len(lefts)), key=lambda i: lefts[i])
    return share_tokens(prefills(*lefts), order, tokens, rows)


def test_half_by_age_half_by_what_is_left():
    assert share([1000, 900, 30], 100, 8) == [50, 20, 30]
    assert share([1000, 900, 80], 100, 8) == [50, 0, 50]
    assert share([10, 1000], 100, 8) == [10, 90]


def test_a_row_is_kept_for_the_prompt_with_the_least_left():
    assert share([5, 40, 1000, 3], 100, 3) == [5, 40, 0, 3]


@given(
    lefts=st.lists(st.integers(1, 500), max_size=12),
    tokens=st.integers(0, 256),
    rows=st.integers(0, 12),
)
def test_shares_keep_the_budgets_and_waste_nothing(lefts: list[int], tokens: int, rows: int):
    grants = share(lefts, tokens, rows)
    used = sum(1 for grant in grants if grant)
    assert all(0 <= grant <= left for grant, left in zip(grants, lefts, strict=True))
    assert sum(grants) <= tokens
    assert used <= rows
    if used < min(rows, len(lefts)):
        assert sum(grants) == min(tokens, sum(lefts))
    if tokens and rows and lefts:
        assert grants[0] >= min(lefts[0], (tokens + 1) // 2)


@given(
    decodes=st.integers(0, 32),
    lefts=st.lists(st.integers(1, 500), max_size=8),
    seqs=st.sampled_from([32, 40]),
)
def test_a_choice_holds_what_it_grants(decodes: int, lefts: list[int], seqs: int):
    plan = default_plan(PlanLimits(seqs, 256, 8))
    choice = choose(decodes, *lefts[: seqs - decodes], plan=plan)
    if choice is None:
        assert decodes == 0
        assert not lefts
        return
    granted = sum(choice.grants)
    assert decodes + granted <= choice.shape.num_tokens
    assert decodes + sum(1 for grant in choice.grants if grant) <= choice.shape.num_seqs
    assert granted >= min(16, sum(lefts[: seqs - decodes]))
