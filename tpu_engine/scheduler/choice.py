"""Which compiled shape a step runs at, and how many prompt tokens each prefill gets in it.

Pure functions: they own the policy of filling shapes and know neither requests nor pages. The
shape is chosen first and then filled exactly; a chunk is never chosen first and padded after.

Two promises hold as long as the largest shape has room beside the decodes:
- every step computes at least `min_prefill_tokens` prompt tokens while prompts wait in slots;
- of the prompt tokens of a step, half go to the oldest prompt first, half to the one with the
  least left first, and one row is kept for the latter. So the oldest prompt advances every step,
  and a prompt of n tokens, with k prompts of m tokens together that have less left, is computed
  after at most `ceil((n + m) / floor(p / 2)) + k` steps of p prompt tokens each, however long
  the prompts before it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buckets.plan import Plan
from buckets.shape import StepShape

StepCost = Callable[[StepShape], float]
"""Predicted cost of one step at a shape; any unit, as long as it is the same for all shapes."""


@dataclass(frozen=True, slots=True)
class ExecutedTokensCost:
    """Cost in tokens: those executed plus what a step costs whatever its size (weights read)."""

    overhead_tokens: float = 16.0

    def __call__(self, shape: StepShape) -> float:
        return shape.num_tokens + self.overhead_tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt work of one slot: `left` tokens to go, at most `cap` of them in this step (>= 1)."""

    slot: int
    left: int
    cap: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A shape and the prompt tokens each prefill gets (0: none), in the order they were given."""

    shape: StepShape
    grants: tuple[int, ...]


def choose_step(
    plan: Plan,
    num_decodes: int,
    prefills: Sequence[Prefill],
    cost: StepCost,
    min_prefill_tokens: int,
) -> Choice | None:
    """The shape with the most useful tokens per cost that holds every decode; None without work.

    `prefills` come oldest first. A shape that gives prompts less than `min_prefill_tokens` (or
    all that is left of them) loses to one that gives more, and a shape with a row for one prompt
    only loses to one with rows for two, whatever their scores.
    """
    by_left = sorted(range(len(prefills)), key=lambda i: prefills[i].left)
    floor = min(min_prefill_tokens, sum(prefill.cap for prefill in prefills))
    best: Choice | None = None
    best_rank = (-1, False, 0.0)
    for shape in plan.full_shapes:
        rows = min(shape.num_seqs, shape.num_logit_rows) - num_decodes
        tokens = shape.num_tokens - num_decodes
        if rows < 0 or tokens < 0:
            continue
        grants = share_tokens(prefills, by_left, tokens, rows)
        granted = sum(grants)
        if num_decodes + granted == 0:
            continue
        score = (num_decodes + granted) / cost(shape)
        rank = (min(granted, floor), rows >= min(2, len(prefills)), score)
        if rank > best_rank:
            best, best_rank = Choice(shape, tuple(grants)), rank
    return best


def share_tokens(
    prefills: Sequence[Prefill], by_left: Sequence[int], num_tokens: int, num_rows: int
) -> list[int]:
    """Splits `num_tokens` over at most `num_rows` prefills: half by age, the rest by least left.

    `by_left` lists the indices of `prefills`, least left first.
    """
    grants = [0] * len(prefills)
    kept = 1 if num_rows > 1 and len(prefills) > 1 else 0
    half = (num_tokens + 1) // 2
    unused, rows = _grant(grants, prefills, range(len(prefills)), half, num_rows - kept)
    _grant(grants, prefills, by_left, num_tokens - half + unused, rows + kept)
    return grants


def _grant(
    grants: list[int],
    prefills: Sequence[Prefill],
    order: Sequence[int],
    num_tokens: int,
    num_rows: int,
) -> tuple[int, int]:
    """Adds to `grants` in `order` until tokens or rows run out; returns what is left of both."""
    for i in order:
        if num_tokens == 0:
            break
        if grants[i] == 0:
            if num_rows == 0:
                continue
            num_rows -= 1
        more = min(prefills[i].cap - grants[i], num_tokens)
        grants[i] += more
        num_tokens -= more
    return num_tokens, num_rows
