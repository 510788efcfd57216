from dataclasses import replace

import numpy as np
import pytest

from buckets.plan import InvalidPlan, Plan, PlanLimits, default_plan
from buckets.shape import StepShape
from tests.fake_engine import EOS, FakeEngine, request
from tests.fake_runner import expected_tokens
from tpu_engine.errors import InvalidConfig, InvalidRequest, Overloaded
from tpu_engine.kv_pages import PagePool
from tpu_engine.messages import End, Submit
from tpu_engine.request import (
    LEGAL_TRANSITIONS,
    TERMINAL_STATES,
    Finish,
    FinishReason,
    Request,
    RequestState,
    SamplingParams,
)
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.scheduler.sequence import IllegalTransition, Sequence
from tpu_engine.step_plan import StepPlan, StepResult

CANCEL = Finish(FinishReason.CANCELLED, "asked")


# --- at the door -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field", "limit"),
    [
        (0, 1, "prompt", "at least 1 token"),
        (4, 0, "max_tokens", "at least 1"),
        (128, 1, "prompt", "at most 127 tokens (max_model_len)"),
        (100, 29, "max_tokens", "at most 28 after a prompt of 100 tokens (max_model_len)"),
    ],
)
def test_requests_that_can_never_run_are_refused(
    num_prompt: int, max_tokens: int, field: str, limit: str
):
    engine = FakeEngine()
    with pytest.raises(InvalidRequest) as caught:
        engine.scheduler.add(request(1, num_prompt, max_tokens), 0.0)
    assert (caught.value.field, caught.value.limit) == (field, limit)
    assert not engine.scheduler.has_work


def test_a_request_larger_than_the_pool_is_refused_and_the_next_one_runs():
    engine = FakeEngine(pages=6)
    with pytest.raises(InvalidRequest, match=r"at most 21 tokens \(the KV pool\), got 22"):
        engine.scheduler.add(request(1, 12, 10), 0.0)
    engine.run([request(2, 12, 9)])
    assert engine.tokens[2] == expected_tokens(request(2, 12, 9))


def test_the_same_id_twice_is_refused():
    engine = FakeEngine()
    engine.scheduler.add(request(1), 0.0)
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.scheduler.add(request(1), 0.0)


def test_the_queue_is_bounded():
    engine = FakeEngine(seqs=1, max_waiting=2)
    engine.turn([Submit(request(0))])
    engine.scheduler.add(request(1), 0.0)
    engine.scheduler.add(request(2), 0.0)
    with pytest.raises(Overloaded) as caught:
        engine.scheduler.add(request(3), 0.0)
    assert (caught.value.limit, caught.value.given) == (2, 3)
    engine.run()
    assert sorted(engine.finishes) == [0, 1, 2]


def test_requests_that_find_a_slot_do_not_count_as_waiting():
    """Three that came in one turn were refused where two slots were free and one might wait."""
    engine = FakeEngine(seqs=2, max_waiting=1)
    engine.turn([Submit(request(i)) for i in range(4)])
    assert list(engine.refused) == [3]
    error = engine.refused[3].error
    assert isinstance(error, Overloaded)
    assert (error.limit, error.given) == (1, 2)
    engine.run()
    assert sorted(engine.finishes) == [0, 1, 2]


def test_a_plan_that_does_not_fit_is_refused():
    holes = Plan.of([StepShape(4, 4, 8, 4), StepShape(32, 1, 8, 1)])
    with pytest.raises(InvalidPlan, match="no full shape covers"):
        Scheduler(holes, SchedulerLimits(32, 4), PagePool(9))
    narrow = default_plan(PlanLimits(4, 32, 8))
    with pytest.raises(InvalidConfig, match=r"max_model_len.*at most 32"):
        Scheduler(narrow, SchedulerLimits(33, 4), PagePool(9))


# --- stops -----------------------------------------------------------------------------------


def test_max_tokens_is_never_exceeded_nor_decoded_for():
    engine = FakeEngine()
    engine.run([request(1, 5, 6)])
    assert engine.finishes[1] == Finish(FinishReason.LENGTH)
    assert len(engine.tokens[1]) == 6
    assert sum(plan.num_useful_tokens for plan in engine.runner.plans) == 5 + 6 - 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_ends_the_request_and_is_delivered_with_it(overlap: bool):
    stop = expected_tokens(request(1, 8, 20))[4]
    asked = request(1, 8, 20, stop_token_ids=(stop,))
    engine = FakeEngine(overlap=overlap)
    engine.run([asked, request(2, 8, 20)])
    assert engine.finishes[1] == Finish(FinishReason.STOP, stop_token_id=stop)
    assert engine.tokens[1] == expected_tokens(asked)
    assert engine.tokens[1][-1] == stop
    assert engine.tokens[2] == expected_tokens(request(2, 8, 20))


def test_a_stop_token_in_the_last_allowed_place_is_a_stop():
    stop = expected_tokens(request(1, 8, 5))[4]
    engine = FakeEngine()
    engine.run([request(1, 8, 5, stop_token_ids=(stop,))])
    assert engine.finishes[1] == Finish(FinishReason.STOP, stop_token_id=stop)


def test_eos_stops_unless_it_is_ignored():
    found = next(i for i in range(500) if EOS & set(expected_tokens(request(i, 4, 30))))
    engine = FakeEngine()
    engine.run([request(found, 4, 30, ignore_eos=False)])
    assert engine.finishes[found].reason is FinishReason.STOP
    assert engine.finishes[found].stop_token_id in EOS
    engine = FakeEngine()
    engine.run([request(found, 4, 30)])
    assert engine.finishes[found].reason is FinishReason.LENGTH


def test_a_row_with_bad_logits_ends_alone():
    engine = FakeEngine()
    engine.runner.nan_requests.add(1)
    engine.run([request(1), request(2)])
    assert engine.finishes[1] == Finish(FinishReason.ERROR, "non-finite logits")
    assert engine.tokens[1] == []
    assert engine.tokens[2] == expected_tokens(request(2))


# --- ends from outside -----------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("overlap", [True, False])
def test_a_cancel_works_wherever_the_request_is(turns: int, overlap: bool):
    engine = FakeEngine(seqs=2, tokens=8, overlap=overlap)
    engine.turn([Submit(request(i, 20, 30)) for i in (1, 11, 12)])
    for _ in range(turns):
        engine.turn()
    engine.turn([End(1, CANCEL), End(12, CANCEL), End(111, CANCEL)])
    num_plans = len(engine.runner.plans)
    assert engine.finishes == {1: CANCEL, 12: CANCEL}
    engine.turn([End(1, CANCEL)])
    engine.run()
    later = [i for plan in engine.runner.plans[num_plans:] for i in plan.request_ids.tolist()]
    assert set(later) == {11}, "a cancelled request was scheduled, or the other one stopped"
    assert engine.tokens[11] == expected_tokens(request(11, 20, 30))
    assert expected_tokens(request(1, 20, 30))[: len(engine.tokens[1])] == engine.tokens[1]


def test_deadlines_end_waiting_and_running_requests():
    engine = FakeEngine(seqs=1)
    engine.turn(
        [
            Submit(request(1, 4, 100, deadline_s=10.0)),
            Submit(request(2, 4, 4, deadline_s=6.0)),
            Submit(request(3, 4, 4, deadline_s=1000.0)),
        ]
    )
    engine.run()
    ends = {o.request_id: o.time_s for o in engine.outputs if o.finish}
    assert engine.finishes[1] == engine.finishes[2] == Finish(FinishReason.DEADLINE)
    assert (ends[1], ends[2]) == (10.0, 6.0)
    assert engine.finishes[3].reason is FinishReason.LENGTH


def test_pages_of_a_cancelled_request_wait_for_the_step_in_flight():
    engine = FakeEngine()
    engine.turn([Submit(request(1, 16, 30))])
    before = engine.pool.num_owned
    engine.scheduler.end(1, CANCEL, 1.0)
    assert (engine.pool.num_owned, engine.pool.num_in_flight) == (0, before)
    engine.turn()
    assert engine.pool.num_free == engine.pool.num_usable


# --- fairness --------------------------------------------------------------------------------


def test_decodes_run_in_every_step_while_long_prompts_are_computed():
    engine = FakeEngine(seqs=8, tokens=32)
    engine.turn([Submit(request(i, 4, 40)) for i in range(3)])
    while min(len(engine.tokens.get(i, [])) for i in range(3)) == 0:
        engine.turn()
    first = len(engine.runner.plans)
    engine.turn([Submit(request(i, 110, 4)) for i in range(10, 14)])
    for _ in range(10):
        engine.turn()
    for plan in engine.runner.plans[first:]:
        assert {0, 1, 2} <= set(plan.request_ids.tolist())
        assert plan.num_useful_tokens > 3, "the prompts must advance in every step"


def test_a_short_prompt_gets_through_behind_long_ones_within_the_stated_steps():
    engine = FakeEngine(seqs=8, tokens=16, max_model_len=2048, pages=3000)
    engine.turn([Submit(request(i, 2000, 4)) for i in range(4)])
    for _ in range(3):
        engine.turn()
    first = len(engine.runner.plans)
    engine.turn([Submit(request(9, 20, 4))])
    while 9 not in engine.tokens:
        engine.turn()
    plans = engine.runner.plans[first:]
    waited = next(i for i, p in enumerate(plans) if 9 in p.request_ids[p.samples].tolist()) + 1
    assert waited <= -(-20 // (16 // 2))
    assert all(0 in p.request_ids.tolist() for p in plans), "the oldest advances in every step"


def test_max_chunk_bounds_every_chunk():
    engine = FakeEngine(max_chunk=5)
    engine.run([request(1, 50, 3), request(2, 7, 3)])
    assert max(int(plan.num_tokens.max()) for plan in engine.runner.plans) == 5


def test_full_buckets_are_filled_exactly():
    engine = FakeEngine(seqs=8, tokens=32)
    engine.run([request(i, 100, 2) for i in range(8)])
    full = [p for p in engine.runner.plans if p.shape.num_tokens == 32]
    assert sum(p.num_useful_tokens == 32 for p in full) >= len(full) - 2


# --- the contract of plans -------------------------------------------------------------------


def columns(plan: StepPlan) -> dict[str, list[float]]:
    return {
        name: getattr(plan.sampling, name).tolist()
        for name in ("temperature", "top_k", "top_p", "min_p", "seed")
    }


def test_a_plan_carries_what_each_request_asked_of_sampling():
    engine = FakeEngine()
    params = SamplingParams(4, 0.5, 7, 0.25, 0.125, seed=2**33 + 2**32 - 5)
    engine.turn(
        [Submit(Request(1, (4, 5), params, 0.0)), Submit(Request(2, (6,), SamplingParams(4), 0.0))]
    )
    (plan,) = engine.runner.plans
    assert columns(plan) == {
        "temperature": [0.5, 0.0],
        "top_k": [7, 0],
        "top_p": [0.25, 1.0],
        "min_p": [0.125, 0.0],
        "seed": [2**32 - 5, 0],
    }
    assert plan.token_ids.tolist() == [4, 5, 6]


def test_the_next_step_reads_the_last_token_on_the_device():
    engine = FakeEngine()
    engine.turn([Submit(request(1, 5, 9))])
    engine.turn()
    first, second = engine.runner.plans
    assert (first.samples.tolist(), first.last_on_device.tolist()) == ([True], [False])
    assert (second.samples.tolist(), second.last_on_device.tolist()) == ([True], [True])
    assert (second.starts.tolist(), second.token_ids.tolist()) == ([5], [0])
    engine = FakeEngine(overlap=False)
    engine.turn([Submit(request(1, 5, 9))])
    engine.turn()
    assert not engine.runner.plans[1].last_on_device.any()
    assert engine.runner.plans[1].token_ids.tolist() == engine.tokens[1][:1]


def test_a_plan_does_not_change_after_it_was_made():
    engine = FakeEngine(seqs=2, pages=20)
    for i in (1, 2):
        engine.scheduler.add(request(i, 10, 9), 0.0)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    copies = {
        name: getattr(plan, name).copy()
        for name in ("epochs", "starts", "num_tokens", "token_ids", "page_table", "samples")
    }
    assert engine.scheduler.schedule(0.0) is not None
    for i in (1, 2):
        engine.scheduler.end(i, CANCEL, 0.0)
    for name, copy in copies.items():
        np.testing.assert_array_equal(getattr(plan, name), copy)


def test_results_must_come_in_order_and_for_their_own_plan():
    engine = FakeEngine()
    engine.scheduler.add(request(1), 0.0)
    first, second = engine.scheduler.schedule(0.0), engine.scheduler.schedule(0.0)
    assert first is not None
    assert second is not None

    def result(step_id: int) -> StepResult:
        return StepResult(
            step_id, np.array([1], np.int32), np.zeros(1, np.float32), np.array([True])
        )

    with pytest.raises(ValueError, match="result of step 2 given for step 1"):
        engine.scheduler.update(first, result(2), 0.0)
    with pytest.raises(ValueError, match="step 2 came after step 0"):
        engine.scheduler.update(second, result(2), 0.0)


def test_outputs_carry_times_and_computed_prompt_tokens():
    engine = FakeEngine(seqs=1, tokens=8, overlap=False)
    engine.run([request(1, 20, 2), request(2, 4, 1)])
    one = [o for o in engine.outputs if o.request_id == 1]
    assert [(o.time_s, o.first_scheduled_s, o.num_computed_prompt_tokens) for o in one] == [
        (3.0, 1.0, 20),
        (4.0, 1.0, 20),
    ]
    (two,) = [o for o in engine.outputs if o.request_id == 2]
    assert two.first_scheduled_s == 5.0


# --- states ----------------------------------------------------------------------------------


def test_only_the_moves_of_the_table_are_possible():
    for origin in RequestState:
        for target in RequestState:
            sequence = Sequence(request(1))
            sequence.state = origin
            if target is origin or target in LEGAL_TRANSITIONS[origin]:
                sequence.move(target)
                assert sequence.state is target
            else:
                with pytest.raises(IllegalTransition, match=f"request 1: {origin} -> {target}"):
                    sequence.move(target)


def test_a_request_passes_through_its_life_in_order():
    engine = FakeEngine(seqs=1, tokens=8, overlap=False)
    seen = [engine.scheduler.state(1)]
    engine.turn([Submit(request(1, 12, 3))])
    while engine.loop.has_work:
        seen.append(engine.scheduler.state(1))
        engine.turn()
    assert seen == [
        None,
        RequestState.PREFILL_READY,
        RequestState.DECODE_READY,
        RequestState.DECODE_READY,
    ]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_ends_every_state(reason: FinishReason):
    for state in set(RequestState) - TERMINAL_STATES:
        sequence = Sequence(request(1))
        sequence.state = state
        sequence.finish(Finish(reason))
        assert sequence.state in TERMINAL_STATES


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = FakeEngine()
    for i in range(1000):
        engine.scheduler.add(replace(request(i), deadline_s=1e6), 0.0)
        engine.scheduler.end(i, CANCEL, 0.0)
    assert len(engine.scheduler._deadlines) < 100
    late = replace(request(1000), deadline_s=5.0)
    engine.scheduler.add(late, 0.0)
    assert [o.request_id for o in engine.scheduler.expire(5.0)] == [1000]
