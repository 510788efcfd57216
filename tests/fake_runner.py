"""A runner without a model, whose every token depends on all tokens that the plan lets it see.

It keeps a fake KV cell per page position and a last-token buffer per slot and touches them only
through the plan, so a wrong page table, start, missed or doubled token changes the output. Steps
run as late as they can (at collect), which shows snapshots that were changed under a plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tpu_engine.errors import DeviceFault
from tpu_engine.request import Request
from tpu_engine.step_plan import InFlight, StepPlan, StepResult

VOCAB = 997
MODULUS = 2**31 - 1


def next_token(tokens: np.ndarray, seed: int) -> int:
    """The token after `tokens [n]`: a hash of all of them, their positions and the seed."""
    places = np.arange(1, len(tokens) + 1, dtype=np.int64)
    mixed = (tokens.astype(np.int64) + 7) * (places * 7919 % 104729 + 13) % MODULUS
    return int((mixed.sum() * 48271 + seed * 31) % MODULUS % VOCAB)


def expected_tokens(request: Request) -> list[int]:
    """What `request` must generate, computed without pages, slots and steps."""
    tokens = list(request.prompt_ids)
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= request.eos_ids
    out: list[int] = []
    while len(out) < request.params.max_tokens:
        out.append(next_token(np.array(tokens + out), request.params.seed))
        if out[-1] in stops:
            break
    return out


@dataclass(frozen=True)
class FakeInFlight:
    plan: StepPlan


class FakeRunner:
    """See the module. `fail_steps` raise `DeviceFault` at collect, `fail_dispatch` at dispatch.

    `nan_requests` get non-finite logits in their row.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self.page_size = page_size
        self.cells = np.full((num_pages, page_size), -1, np.int64)
        self.last_tokens = np.full(num_slots, -1, np.int64)
        self.in_flight: deque[FakeInFlight] = deque()
        self.fail_steps: set[int] = set()
        self.fail_dispatch: set[int] = set()
        self.nan_requests: set[int] = set()
        self.plans: list[StepPlan] = []
        self.max_in_flight = 0

    def dispatch(self, plan: StepPlan) -> FakeInFlight:
        self._check(plan)
        if plan.step_id in self.fail_dispatch:
            raise DeviceFault("dispatch failed")
        handle = FakeInFlight(plan)
        self.in_flight.append(handle)
        self.plans.append(plan)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        return handle

    def collect(self, handle: InFlight) -> StepResult:
        assert self.in_flight.popleft() is handle, "collected out of order"
        plan = handle.plan
        tokens = np.zeros(plan.num_rows, np.int32)
        end = 0
        for row in range(plan.num_rows):
            begin, end = end, end + int(plan.num_tokens[row])
            tokens[row] = self._run_row(plan, row, plan.token_ids[begin:end])
        if plan.step_id in self.fail_steps:
            raise DeviceFault("the device failed")
        finite = np.array([i not in self.nan_requests for i in plan.request_ids.tolist()])
        return StepResult(plan.step_id, tokens, (-tokens / VOCAB).astype(np.float32), finite)

    def _run_row(self, plan: StepPlan, row: int, token_ids: np.ndarray) -> int:
        values = token_ids.astype(np.int64)
        slot, start = int(plan.slots[row]), int(plan.starts[row])
        if plan.last_on_device[row]:
            assert values[-1] == 0
            values[-1] = self.last_tokens[slot]
        pages, offsets = self._where(plan, row, np.arange(start, start + len(values)))
        self.cells[pages, offsets] = values
        if not plan.samples[row]:
            return 0
        seen = self.cells[self._where(plan, row, np.arange(start + len(values)))]
        assert (seen >= 0).all(), f"row {row} of step {plan.step_id} reads what nobody wrote"
        token = next_token(seen, int(plan.sampling.seed[row]))
        self.last_tokens[slot] = token
        return token

    def _where(
        self, plan: StepPlan, row: int, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        pages = plan.page_table[row][positions // self.page_size]
        assert (pages > 0).all(), f"row {row} of step {plan.step_id} touches the null page"
        return pages, positions % self.page_size

    def _check(self, plan: StepPlan) -> None:
        """A plan fits its shape, names no row twice, and no page that others still write."""
        shape = plan.shape
        assert 0 < plan.num_rows <= shape.num_seqs
        assert 0 < plan.num_useful_tokens <= shape.num_tokens
        assert int(plan.num_tokens.sum()) == plan.num_useful_tokens
        assert (plan.num_tokens > 0).all()
        assert int(plan.samples.sum()) <= shape.num_logit_rows
        assert plan.page_table.shape == (plan.num_rows, shape.pages_per_seq)
        assert len(set(plan.request_ids.tolist())) == plan.num_rows
        assert len(set(plan.slots.tolist())) == plan.num_rows
        owner: dict[int, tuple[int, int]] = {}
        for other in [handle.plan for handle in self.in_flight] + [plan]:
            for row, (request_id, epoch, _, _) in enumerate(other.rows()):
                for page in other.page_table[row][other.page_table[row] > 0].tolist():
                    key = (request_id, epoch)
                    assert owner.setdefault(page, key) == key, f"page {page} has two writers"
