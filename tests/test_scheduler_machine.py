"""A state machine that drives an engine with random requests, ends and faults."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buckets.plan import Plan
from buckets.shape import StepShape
from tests.fake_engine import FakeEngine, audit, request
from tests.fake_runner import expected_tokens
from tpu_engine.messages import End, Inbound, Submit, UsePlan
from tpu_engine.request import Finish, FinishReason, Request

CANCEL = Finish(FinishReason.CANCELLED, "asked")


class EngineMachine(RuleBasedStateMachine):
    """Messages pile up until the next turn, as they do in the inbox of a real engine."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Request] = {}
        self.inbox: list[Inbound] = []
        self.ended_at: dict[int, int] = {}

    @initialize(
        seqs=st.sampled_from([1, 3, 6]),
        tokens=st.sampled_from([6, 17, 40]),
        pages=st.sampled_from([14, 25, 80]),
        overlap=st.booleans(),
        max_chunk=st.sampled_from([None, 4]),
    )
    def build(
        self, seqs: int, tokens: int, pages: int, overlap: bool, max_chunk: int | None
    ) -> None:
        self.engine = FakeEngine(
            seqs=seqs,
            tokens=tokens,
            pages=pages,
            max_model_len=64,
            overlap=overlap,
            max_chunk=max_chunk,
        )
        self.plan = self.engine.plan

    @rule(
        num_prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        deadline_s=st.one_of(st.none(), st.integers(0, 60)),
    )
    def submit(
        self, num_prompt: int, max_tokens: int, ignore_eos: bool, deadline_s: int | None
    ) -> None:
        number = len(self.requests)
        asked = request(
            number,
            num_prompt,
            max_tokens,
            ignore_eos=ignore_eos,
            deadline_s=None if deadline_s is None else self.engine.now + deadline_s,
        )
        self.requests[number] = asked
        self.inbox.append(Submit(asked))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.inbox.append(End(data.draw(st.sampled_from(sorted(self.requests))), CANCEL))

    @rule(data=st.data())
    def swap_the_plan(self, data: st.DataObject) -> None:
        """Any plan with the same top: what requests get must not depend on it."""
        plan = self.engine.plan
        seqs, tokens, width = plan.max_num_seqs, plan.max_num_tokens, plan.pages_per_seq
        pairs = [(t, b) for b in range(1, seqs + 1) for t in range(b, tokens + 1)]
        chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=4))
        shapes = [StepShape(t, b, width, b) for t, b in [*chosen, (tokens, seqs)]]
        self.inbox.append(UsePlan(Plan.of(shapes)))

    @rule(at_dispatch=st.booleans())
    def break_the_next_step(self, at_dispatch: bool) -> None:
        runner = self.engine.runner
        steps = runner.fail_dispatch if at_dispatch else runner.fail_steps
        steps.add(self.engine.loop.status().steps + 2)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self._turn()

    def _turn(self) -> None:
        engine = self.engine
        swaps = [message.plan for message in self.inbox if isinstance(message, UsePlan)]
        self.plan = swaps[-1] if swaps else self.plan
        before = engine.scheduler.snapshot()
        num_plans, num_ended = len(engine.runner.plans), len(engine.finishes)
        engine.turn(self.inbox)
        self.inbox = []
        for plan in engine.runner.plans[num_plans:]:
            assert plan.shape in self.plan.shapes, "a step of a plan that was replaced"
            for request_id in plan.request_ids.tolist():
                assert request_id not in self.ended_at, "scheduled after its end"
        for request_id in engine.finishes:
            self.ended_at.setdefault(request_id, len(engine.runner.plans))
        idle = before.running == 0 and before.free_pages == before.total_pages
        if idle and before.waiting and len(engine.finishes) == num_ended:
            assert engine.scheduler.snapshot().running, "nobody was admitted"

    @invariant()
    def outputs_are_what_they_must_be(self) -> None:
        if not self.requests:
            return
        for number, got in self.engine.tokens.items():
            expected = expected_tokens(self.requests[number])
            assert got == expected[: len(got)]
            finish = self.engine.finishes.get(number)
            if finish and finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == expected

    @invariant()
    def nothing_is_computed_twice_or_left_out(self) -> None:
        if self.requests:
            audit(self.engine.runner.plans)

    def teardown(self) -> None:
        if not self.requests:
            return
        engine = self.engine
        for _ in range(4000):
            if not engine.loop.has_work and not self.inbox:
                break
            self._turn()
        assert not engine.loop.has_work, "something waits for ever"
        assert engine.pool.num_free == engine.pool.num_usable
        assert set(engine.finishes) | set(engine.refused) == set(self.requests)
        done = audit(engine.runner.plans)
        for number, finish in engine.finishes.items():
            if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                asked = self.requests[number]
                most = len(asked.prompt_ids) + len(engine.tokens[number]) - 1
                last = max(epoch for owner, epoch in done if owner == number)
                assert done[number, last] in (most, most + 1), "done + scheduled != original"


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
