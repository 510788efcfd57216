"""A whole engine over the fake runner, and an auditor that checks every step it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from buckets.plan import Plan, PlanLimits, default_plan
from tests.fake_runner import FakeRunner
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.kv_pages import PagePool
from tpu_engine.messages import Inbound, Outbound, Refused, RequestOutput, Submit
from tpu_engine.request import Finish, Request, SamplingParams
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.step_plan import StepPlan

PAGE_SIZE = 4
EOS = frozenset({3, 141})


def request(
    request_id: int,
    num_prompt: int = 8,
    max_tokens: int = 8,
    *,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    deadline_s: float | None = None,
    arrival_s: float | None = None,
) -> Request:
    """A request whose prompt and seed depend on its id only."""
    prompt = np.random.default_rng(request_id).integers(0, 900, num_prompt).tolist()
    params = SamplingParams(
        max_tokens, seed=request_id, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    arrival_s = float(request_id) if arrival_s is None else arrival_s
    return Request(request_id, tuple(prompt), params, arrival_s, deadline_s, eos_ids=EOS)


class FakeEngine:
    """Engine loop, scheduler, pool and fake runner with their outputs collected by request."""

    def __init__(
        self,
        *,
        seqs: int = 4,
        tokens: int = 32,
        pages: int = 200,
        max_model_len: int = 128,
        overlap: bool = True,
        plan: Plan | None = None,
        max_chunk: int | None = None,
        max_waiting: int = 1000,
        runner: FakeRunner | None = None,
    ) -> None:
        width = -(-max_model_len // PAGE_SIZE)
        self.plan = plan or default_plan(PlanLimits(seqs, tokens, width))
        self.pool = PagePool(pages)
        self.limits = SchedulerLimits(
            max_model_len, PAGE_SIZE, max_waiting=max_waiting, max_chunk=max_chunk
        )
        self.scheduler = Scheduler(self.plan, self.limits, self.pool)
        self.runner = runner or FakeRunner(pages, PAGE_SIZE, self.plan.max_num_seqs)
        self.loop = EngineLoop(self.scheduler, self.runner, overlap, lambda: 5)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.refused: dict[int, Refused] = {}
        self.outputs: list[RequestOutput] = []

    def turn(self, messages: Iterable[Inbound] = ()) -> list[Outbound]:
        """One turn, one second later, with the invariants that hold after every turn."""
        self.now += 1.0
        outputs = self.loop.turn(list(messages), self.now)
        for output in outputs:
            if isinstance(output, Refused):
                self.refused[output.request_id] = output
                continue
            assert output.request_id not in self.finishes, "output after the final one"
            assert len(output.token_ids) == len(output.logprobs)
            self.outputs.append(output)
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.finishes[output.request_id] = output.finish
        self.pool.audit()
        return outputs

    def run(self, requests: Sequence[Request] = (), max_turns: int = 3000) -> int:
        """Submits `requests` together and turns until all is done; returns the turns it took."""
        self.turn([Submit(r) for r in requests])
        turns = 1
        while self.loop.has_work:
            self.turn()
            turns += 1
            assert turns < max_turns, f"still {self.loop.status()} after {turns} turns"
        assert self.pool.num_free == self.pool.num_usable, "pages did not come back"
        audit(self.runner.plans)
        return turns


def audit(plans: Iterable[StepPlan]) -> dict[tuple[int, int], int]:
    """Checks that every stay (request, epoch) computes its tokens once, in order, from 0.

    Returns how many tokens each stay computed.
    """
    done: dict[tuple[int, int], int] = {}
    stays: dict[int, list[int]] = {}
    for plan in plans:
        for request_id, epoch, start, num_tokens in plan.rows():
            assert start == done.get((request_id, epoch), 0), "omitted or doubled tokens"
            done[request_id, epoch] = start + num_tokens
            if epoch not in stays.setdefault(request_id, []):
                stays[request_id].append(epoch)
            assert stays[request_id][-1] == epoch, "an old stay ran after a new one began"
    return done
