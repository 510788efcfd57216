"""`Scheduler`: decides, step by step, which tokens of which requests run at which shape.

Owns the live requests, the waiting queue, the slots and the page pool. Promises: decodes run in
every step; nobody overtakes in the queue; pages are taken together with the plan or not at all;
every accepted request gets exactly one final output. Doesn't know devices, text, clocks (`now` is
an argument) or how a plan is executed. The next step may be planned before earlier ones are read
back; results are applied in the order of their steps, and rows whose epoch has moved on are
dropped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buckets.plan import Plan, PlanLimits
from tpu_engine.errors import InvalidConfig, InvalidRequest, Overloaded
from tpu_engine.kv_pages import PagePool
from tpu_engine.messages import RequestOutput
from tpu_engine.request import Finish, FinishReason, Request, RequestState
from tpu_engine.scheduler.choice import (
    ExecutedTokensCost,
    Prefill,
    StepCost,
    choose_step,
)
from tpu_engine.scheduler.limits import SchedulerLimits
from tpu_engine.scheduler.memory import Watermark, least_progress
from tpu_engine.scheduler.queue import WaitingQueue
from tpu_engine.scheduler.sequence import Sequence
from tpu_engine.scheduler.slots import SlotTable
from tpu_engine.step_plan import Int32, StepPlan, StepResult

_DEFAULT_COST = ExecutedTokensCost()
_PREFILL_STATES = (RequestState.PREFILL_READY, RequestState.PREFILL_RUNNING)


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Gauges now (requests, pages without the null page) and counters since start."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    watermark: Watermark
    preemptions: int


class Scheduler:
    """Continuous batching over the shapes of one plan and the pages of one pool."""

    def __init__(
        self,
        plan: Plan,
        limits: SchedulerLimits,
        pool: PagePool,
        cost: StepCost = _DEFAULT_COST,
    ) -> None:
        """Raises `InvalidPlan` for a plan with holes, `InvalidConfig` for one too narrow."""
        self._budgets = PlanLimits(plan.max_num_seqs, plan.max_num_tokens, plan.pages_per_seq)
        plan.validate(self._budgets)
        if plan.pages_per_seq * limits.page_size < limits.max_model_len:
            raise InvalidConfig(
                "max_model_len",
                f"at most {plan.pages_per_seq * limits.page_size} (the plan's "
                f"{plan.pages_per_seq} pages per sequence)",
                limits.max_model_len,
            )
        self._plan = plan
        self._limits = limits
        self._pool = pool
        self._cost = cost
        self._table = SlotTable(plan.max_num_seqs, plan.pages_per_seq, limits.page_size)
        self._queue = WaitingQueue()
        self._live: dict[int, Sequence] = {}
        self._slot_of: dict[int, int] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._ended_in_round: list[RequestOutput] = []
        self._last_planned = 0
        self._last_landed = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any accepted request has not ended."""
        return bool(self._live)

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Accepted requests that have not ended."""
        return tuple(self._live)

    def state(self, request_id: int) -> RequestState | None:
        """Where a live request is in its life; None for any other id."""
        sequence = self._live.get(request_id)
        return None if sequence is None else sequence.state

    def snapshot(self) -> SchedulerSnapshot:
        free, usable = self._pool.num_free, self._pool.num_usable
        return SchedulerSnapshot(
            running=self._table.num_occupied,
            waiting=len(self._queue),
            free_pages=free,
            total_pages=usable,
            watermark=self._limits.watermarks.of(free, usable),
            preemptions=self._num_preemptions,
        )

    def set_plan(self, plan: Plan) -> None:
        """Plans with these shapes from the next step on; raises `InvalidPlan` for other budgets."""
        plan.validate(self._budgets)
        self._plan = plan

    # --- requests come and go ----------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Accepts `request` into the queue.

        Raises `InvalidRequest` for one that can never be served and `Overloaded` when the queue is
        full; `now` is unused by this policy but part of the contract.
        """
        self._limits.require_servable(request, self._pool.num_usable)
        if request.request_id in self._live:
            raise InvalidRequest("request_id", "unused by a live request", request.request_id)
        # Those who find a slot in the next round don't wait, however many come in one turn.
        waiting = len(self._queue) - self._table.num_vacant
        if waiting >= self._limits.max_waiting:
            limits = self._limits
            raise Overloaded(
                "waiting requests", limits.max_waiting, waiting + 1, limits.retry_after_s
            )
        sequence = Sequence(request)
        self._live[request.request_id] = sequence
        self._queue.add(sequence)
        if request.deadline_s is not None:
            self._note_deadline(request.deadline_s, request.request_id)

    def end(self, request_id: int, finish: Finish, now: float) -> list[RequestOutput]:
        """Ends a request wherever it is; `[]` for an id that is unknown or has ended.

        Tokens in flight are dropped, pages come back once no dispatched step touches them.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        return [self._finish(sequence, finish, now)]

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends every request whose deadline is not after `now`."""
        outputs: list[RequestOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            outputs += self.end(request_id, Finish(FinishReason.DEADLINE), now)
        return outputs

    def _note_deadline(self, deadline_s: float, request_id: int) -> None:
        """Remembers a deadline; those of ended requests never pile up."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, request_id))

    # --- one scheduling round ----------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step; None when no token can run now.

        The plan counts as dispatched: `update` or `abandon` must follow, in the order of steps.
        Requests that had to be ended on the way are in `take_ended()`.
        """
        for _ in range(self._plan.max_num_seqs + 1):
            plan = self._plan_round(now)
            if plan is not None or not self._break_stall(now):
                return plan
        return None

    def take_ended(self) -> list[RequestOutput]:
        """Final outputs of the requests that `schedule` ended since the last call."""
        ended, self._ended_in_round = self._ended_in_round, []
        return ended

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Applies a collected step: progress, tokens, ends, pages; returns what became known."""
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} given for step {plan.step_id}")
        self._require_next(plan)
        table = self._table
        live = table.epoch[plan.slots] == plan.epochs
        slots, samples, token_ids = plan.slots[live], plan.samples[live], result.token_ids[live]
        table.land(slots, plan.num_tokens[live], samples, token_ids)
        outputs: list[RequestOutput] = []
        rows = zip(
            slots.tolist(),
            samples.tolist(),
            token_ids.tolist(),
            result.logprobs[live].tolist(),
            result.finite[live].tolist(),
            strict=True,
        )
        for slot, sampled, token_id, logprob, finite in rows:
            sequence = table.at(slot)
            if not sampled:
                self._settle(sequence, slot)
            elif not finite:
                finish = Finish(FinishReason.ERROR, "non-finite logits")
                outputs.append(self._finish(sequence, finish, now))
            else:
                outputs.append(self._deliver(sequence, slot, (token_id, logprob), now))
        self._pool.collect(plan.step_id)
        return outputs

    def abandon(self, plan: StepPlan, finish: Finish, now: float) -> list[RequestOutput]:
        """Gives up a step whose result will never come: ends the requests that were in it."""
        self._require_next(plan)
        live = self._table.epoch[plan.slots] == plan.epochs
        outputs: list[RequestOutput] = []
        for request_id in plan.request_ids[live].tolist():
            outputs += self.end(request_id, finish, now)
        self._pool.collect(plan.step_id)
        return outputs

    def _plan_round(self, now: float) -> StepPlan | None:
        decodes = self._decodes_with_pages(now)
        decode_pages = self._table.missing_pages(decodes, np.ones(len(decodes), np.int32))
        num_spare = self._pool.num_free - int(decode_pages.sum())
        self._admit(num_spare)
        prefills = self._prefills(num_spare)
        choice = choose_step(
            self._plan, len(decodes), prefills, self._cost, self._limits.min_prefill_tokens
        )
        if choice is None:
            return None
        granted = [(p.slot, n) for p, n in zip(prefills, choice.grants, strict=True) if n]
        slots = np.concatenate([decodes, np.array([s for s, _ in granted], np.int64)])
        num_tokens = np.array([1] * len(decodes) + [n for _, n in granted], np.int32)
        self._take_pages(slots, num_tokens)
        self._mark_running(slots, len(decodes), now)
        self._last_planned += 1
        return self._table.dispatch(self._last_planned, choice.shape, slots, num_tokens)

    def _decodes_with_pages(self, now: float) -> NDArray[np.int64]:
        """The decodes that can run now, oldest first, after making room for all if it is short.

        Some may have to sit out until a step in flight is collected and its pages are back.
        """
        table, pool = self._table, self._pool
        while True:
            slots = table.oldest_first(table.decodable)
            missing = table.missing_pages(slots, np.ones(len(slots), np.int32))
            need = int(missing.sum())
            if need <= pool.num_free:
                return slots
            returning = pool.num_in_flight + int(table.num_pages[table.finishing].sum())
            holders = table.occupied & ~table.finishing & (table.num_pages > 0)
            if need <= pool.num_free + returning or not self._relieve(holders, now):
                fits = (missing == 0) | (np.cumsum(missing) <= pool.num_free)
                return slots[fits]

    def _relieve(self, candidates: NDArray[np.bool_], now: float) -> bool:
        """Preempts the candidate with the least progress, or ends a lone one; False: can't yet."""
        count = int(candidates.sum())
        if count == 0:
            return False
        slot = least_progress(self._table, candidates)
        if count > 1:
            self._preempt(slot)
            return True
        if self._table.in_flight[slot] > 0:
            return False
        finish = Finish(FinishReason.ABORTED, "kv_capacity")
        self._ended_in_round.append(self._finish(self._table.at(slot), finish, now))
        return True

    def _break_stall(self, now: float) -> bool:
        """Nothing was planned: if nothing in flight can help either, relieves the pool."""
        in_flight = self._table.in_flight.any() or self._pool.num_in_flight > 0
        return not in_flight and self._relieve(self._table.occupied, now)

    def _admit(self, num_spare: int) -> None:
        """Gives slots to the head of the queue while its prompt and everybody's growth fit."""
        table, limits = self._table, self._limits
        while table.num_vacant and (head := self._queue.head()) is not None:
            growth = limits.growth_pages
            if self._queue.head_is_parked:
                growth = limits.readmit_growth_pages
            most = -(-(head.limit - 1) // limits.page_size)
            need = min(-(-head.num_known // limits.page_size) + growth, most)
            if need + table.pages_reserved(growth) > num_spare:
                return
            self._queue.remove(head)
            self._slot_of[head.request.request_id] = table.place(head)
            head.move(RequestState.PREFILL_READY)

    def _prefills(self, num_spare: int) -> list[Prefill]:
        """Prompt work of this round, oldest first, cut to the pages there are."""
        table = self._table
        prefills: list[Prefill] = []
        for slot in table.oldest_first(table.prefilling).tolist():
            planned = int(table.computed[slot] + table.in_flight[slot])
            num_pages = int(table.num_pages[slot])
            left = int(table.target[slot]) - planned
            room = (num_pages + num_spare) * table.page_size - planned
            cap = min(left, room, self._limits.max_chunk or left)
            if cap > 0:
                prefills.append(Prefill(slot, left, cap))
                num_spare -= max(0, -(-(planned + cap) // table.page_size) - num_pages)
        return prefills

    def _take_pages(self, slots: NDArray[np.int64], num_tokens: Int32) -> None:
        """Allocates what the rows of this step lack: all of it, as the choice was cut to fit."""
        missing = self._table.missing_pages(slots, num_tokens)
        need = int(missing.sum())
        if need == 0:
            return
        pages = self._pool.allocate(need)
        if pages is None:
            raise RuntimeError(f"planned {need} pages with {self._pool.num_free} free")
        self._table.give_pages(slots, missing, pages)

    def _mark_running(self, slots: NDArray[np.int64], num_decodes: int, now: float) -> None:
        for i, slot in enumerate(slots.tolist()):
            sequence = self._table.at(slot)
            if i >= num_decodes:
                sequence.move(RequestState.PREFILL_RUNNING)
            elif sequence.state is not RequestState.DECODING:
                sequence.move(RequestState.DECODE_READY)
                sequence.move(RequestState.DECODING)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now

    # --- progress and ends -------------------------------------------------------------------

    def _deliver(
        self, sequence: Sequence, slot: int, token: tuple[int, float], now: float
    ) -> RequestOutput:
        finish = sequence.append(token[0])
        if finish is not None:
            return self._finish(sequence, finish, now, token)
        self._settle(sequence, slot)
        return sequence.output(now, int(self._table.computed[slot]), token)

    def _settle(self, sequence: Sequence, slot: int) -> None:
        """Moves a sequence with nothing left in flight to the state in which it waits."""
        if self._table.in_flight[slot] > 0:
            return
        if self._table.computed[slot] < self._table.target[slot]:
            sequence.move(RequestState.PREFILL_READY)
        else:
            sequence.move(RequestState.DECODE_READY)

    def _preempt(self, slot: int) -> None:
        """Takes slot and pages; the tokens known so far will be computed again as a prompt."""
        sequence = self._table.at(slot)
        if sequence.state in _PREFILL_STATES:
            sequence.move(RequestState.PREFILL_PAUSED)
        else:
            sequence.move(RequestState.DECODE_PREEMPTED)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._leave_slot(sequence, slot)
        self._queue.park(sequence)

    def _finish(
        self,
        sequence: Sequence,
        finish: Finish,
        now: float,
        token: tuple[int, float] | None = None,
    ) -> RequestOutput:
        """The one way out for every request, whatever its state and reason."""
        request_id = sequence.request.request_id
        sequence.finish(finish)
        slot = self._slot_of.get(request_id)
        num_computed = 0
        if slot is None:
            self._queue.remove(sequence)
        else:
            num_computed = int(self._table.computed[slot])
            self._leave_slot(sequence, slot)
        del self._live[request_id]
        return sequence.output(now, num_computed, token, finish)

    def _leave_slot(self, sequence: Sequence, slot: int) -> None:
        del self._slot_of[sequence.request.request_id]
        last_step = int(self._table.last_step[slot])
        self._pool.release(self._table.vacate(slot), last_step)

    def _require_next(self, plan: StepPlan) -> None:
        if plan.step_id != self._last_landed + 1:
            raise ValueError(f"step {plan.step_id} came after step {self._last_landed}")
        self._last_landed = plan.step_id
