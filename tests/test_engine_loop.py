import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckets.plan import InvalidPlan, Plan, PlanLimits, default_plan
from buckets.shape import StepShape
from tests.fake_engine import FakeEngine, request
from tests.fake_runner import FakeRunner, expected_tokens
from tpu_engine.engine_loop import MAX_STEP_RECORDS
from tpu_engine.errors import CompileMiss, InvalidRequest, Overloaded
from tpu_engine.messages import End, Refused, Submit, UsePlan
from tpu_engine.request import Finish, FinishReason, Request
from tpu_engine.step_plan import StepPlan

CANCEL = Finish(FinishReason.CANCELLED)


def mixed(count: int) -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        request(i, int(rng.integers(1, 90)), int(rng.integers(1, 30)), ignore_eos=False)
        for i in range(count)
    ]


ONE_SHAPE = Plan.of([StepShape(32, 8, 32, 8)])
DENSE = Plan.of(
    [StepShape(t, b, 32, b) for t in (1, 3, 8, 13, 21, 32) for b in (1, 3, 8) if b <= t]
)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_chunk", [None, 1, 3, 16])
@pytest.mark.parametrize("plan", [None, ONE_SHAPE, DENSE], ids=["default", "one", "dense"])
@pytest.mark.parametrize("pages", [400, 34], ids=["roomy", "tight"])
def test_outputs_do_not_depend_on_how_they_were_computed(
    overlap: bool, max_chunk: int | None, plan: Plan | None, pages: int
):
    engine = FakeEngine(seqs=8, plan=plan, max_chunk=max_chunk, pages=pages, overlap=overlap)
    requests = mixed(12)
    engine.run(requests)
    for r in requests:
        assert engine.tokens[r.request_id] == expected_tokens(r)
    assert engine.runner.max_in_flight == (2 if overlap else 1)


def test_outputs_do_not_depend_on_company_and_order():
    requests = mixed(8)
    for order in itertools.islice(itertools.permutations(requests), 0, 5000, 1000):
        engine = FakeEngine(seqs=4)
        engine.run(order)
        assert all(engine.tokens[r.request_id] == expected_tokens(r) for r in requests)
    for r in requests:
        alone = FakeEngine(seqs=4)
        alone.run([r])
        assert alone.tokens[r.request_id] == expected_tokens(r)


@settings(max_examples=30, deadline=None)
@given(
    cancels=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 40)), max_size=16),
    pages=st.sampled_from([34, 60, 300]),
    overlap=st.booleans(),
)
def test_cancels_disturb_nobody_else(cancels: list[tuple[int, int]], pages: int, overlap: bool):
    engine = FakeEngine(seqs=6, pages=pages, overlap=overlap)
    requests = mixed(16)
    engine.turn([Submit(r) for r in requests])
    for turn in range(41):
        engine.turn([End(i, CANCEL) for i, when in cancels if when == turn])
    engine.run()
    assert len(engine.finishes) == 16
    for r in requests:
        expected, got = expected_tokens(r), engine.tokens[r.request_id]
        if engine.finishes[r.request_id] == CANCEL:
            assert got == expected[: len(got)]
        else:
            assert got == expected


def test_two_hundred_random_cancels_leak_nothing():
    rng = np.random.default_rng(1)
    engine = FakeEngine(seqs=8, pages=90)
    requests = [request(i, int(rng.integers(1, 60)), 30) for i in range(200)]
    ends = [(int(turn), i) for i, turn in enumerate(rng.integers(1, 150, 200))]
    turn = 0
    while turn < 160 or engine.loop.has_work:
        arriving = [Submit(r) for r in requests[turn * 2 : turn * 2 + 2]]
        engine.turn([*arriving, *(End(i, CANCEL) for when, i in ends if when == turn)])
        turn += 1
    assert len(engine.finishes) == 200
    assert engine.pool.num_free == engine.pool.num_usable


def test_a_request_larger_than_what_is_free_is_admitted_once_the_pool_is_empty():
    """Nothing runs, pages are free, somebody waits: the next round admits."""
    engine = FakeEngine(seqs=4, pages=33)
    engine.turn([Submit(request(1, 100, 20)), Submit(request(2, 100, 28))])
    while engine.scheduler.snapshot().running:
        engine.turn()
    engine.turn()
    assert engine.scheduler.snapshot().running == 1 or engine.finishes.keys() == {1, 2}
    engine.run()
    assert engine.tokens[2] == expected_tokens(request(2, 100, 28))


def test_refusals_reach_the_front_as_such():
    engine = FakeEngine(seqs=1, max_waiting=1)
    asked = [request(1), request(2), request(3), request(4, 200, 1)]
    engine.turn([Submit(r) for r in asked])
    engine.run()
    assert isinstance(engine.refused[3].error, Overloaded)
    assert isinstance(engine.refused[4].error, InvalidRequest)
    assert sorted(engine.finishes) == [1, 2]


def test_with_overlap_the_next_step_is_dispatched_before_the_last_is_collected():
    engine = FakeEngine()
    assert engine.turn([Submit(request(1, 4, 3))]) == []
    (first,) = engine.turn()
    assert first.request_id == 1
    assert engine.loop.progressed
    engine.turn()
    engine.turn()
    engine.turn()
    assert not engine.loop.has_work
    assert not engine.loop.progressed
    direct = FakeEngine(overlap=False)
    assert len(direct.turn([Submit(request(1, 4, 3))])) == 1


def test_status_and_records_add_up():
    engine = FakeEngine(seqs=2)
    engine.run([request(i, 10, 5) for i in range(3)])
    status = engine.loop.status()
    records = engine.loop.records
    assert status.steps == len(records) == len(engine.runner.plans)
    assert status.useful_tokens == sum(r.useful_tokens for r in records) == 3 * 14
    assert status.executed_tokens == sum(r.shape.num_tokens for r in records)
    assert (status.running, status.waiting, status.compile_count) == (0, 0, 5)
    assert (status.free_pages, status.total_pages) == (199, 199)
    assert status.watermark == "normal"
    assert records[0].rows[0][0] == 0
    assert records[0].collected_s > records[0].planned_s
    assert records.maxlen == MAX_STEP_RECORDS


def test_now_may_be_a_clock():
    engine = FakeEngine(overlap=False)
    ticks = itertools.count(100.0)
    output = engine.loop.turn([Submit(request(1, 4, 1))], lambda: next(ticks))[0]
    assert not isinstance(output, Refused)
    assert (output.time_s, output.first_scheduled_s) == (101.0, 100.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_fault_ends_what_was_in_the_step_and_nothing_else(overlap: bool):
    engine = FakeEngine(seqs=4, overlap=overlap)
    engine.runner.fail_steps = {3}
    engine.run([request(1, 4, 20), request(2, 4, 20), *(request(i, 4, 9) for i in (5, 6, 7))])
    faulty = {i for i, f in engine.finishes.items() if f.reason is FinishReason.ERROR}
    assert faulty == set(engine.runner.plans[2].request_ids.tolist())
    assert engine.finishes[1].detail == "the device failed"
    assert engine.tokens[7] == expected_tokens(request(7, 4, 9))
    assert [r.fault for r in engine.loop.records if r.fault] == ["the device failed"]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_cannot_be_dispatched_ends_its_requests(overlap: bool):
    engine = FakeEngine(overlap=overlap)
    engine.runner.fail_dispatch = {2}
    engine.run([request(1, 4, 20)])
    assert engine.finishes[1].reason is FinishReason.ERROR
    got = engine.tokens[1]
    assert got == expected_tokens(request(1, 4, 20))[: len(got)]
    assert len(got) == 1


class MissingShape(FakeRunner):
    def dispatch(self, plan: StepPlan):
        if plan.num_rows == 2:
            raise CompileMiss(plan.shape, tuple(plan.request_ids.tolist()), "not in the plan")
        return super().dispatch(plan)


def test_a_missing_shape_names_itself_and_the_requests():
    engine = FakeEngine(runner=MissingShape(200, 4, 4))
    engine.turn([Submit(request(1, 4, 4)), Submit(request(2, 4, 4))])
    engine.run()
    assert engine.finishes[1].reason is FinishReason.ERROR
    assert "no executable for tokens=" in engine.finishes[1].detail
    assert "requests [1, 2]" in engine.finishes[1].detail


def test_default_plans_of_other_limits_serve_as_well():
    for seqs, tokens in ((1, 1), (1, 16), (5, 5), (7, 50)):
        plan = default_plan(PlanLimits(seqs, tokens, 32))
        engine = FakeEngine(plan=plan)
        engine.run(mixed(5))
        assert all(engine.tokens[r.request_id] == expected_tokens(r) for r in mixed(5))


def test_a_plan_is_settled_once_no_step_of_the_old_one_is_in_flight() -> None:
    engine = FakeEngine(overlap=True)
    assert engine.loop.settled_plan is None, "none was set"
    engine.turn([Submit(request(1, num_prompt=4, max_tokens=5))])
    plan = Plan.of([engine.plan.shapes[-1]])
    engine.loop.use_plan(UsePlan(plan))
    assert engine.loop.settled_plan is None, "the prompt's step is still in flight"
    engine.turn()
    assert engine.loop.settled_plan is plan
    with pytest.raises(InvalidPlan, match="exceeds"):
        engine.loop.use_plan(UsePlan(Plan.of([StepShape(999, 4, plan.pages_per_seq, 4)])))
    assert engine.loop.settled_plan is plan
    while engine.loop.has_work:
        engine.turn()
    assert {p.shape for p in engine.runner.plans[1:]} == set(plan.shapes)


def test_seconds_of_overlapping_steps_are_counted_once() -> None:
    engine = FakeEngine(overlap=True)
    engine.run([request(i, num_prompt=20, max_tokens=6) for i in range(3)])
    uses = engine.loop.status().shapes
    assert sum(use.steps for use in uses) == engine.loop.status().steps
    assert 0 < sum(use.seconds for use in uses) <= engine.now
