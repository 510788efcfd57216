"""How much of each planned shape the scheduler would leave empty, before there is any traffic.

Owns the spread of situations that stands for unknown traffic: numbers of decodes and of waiting
prompt tokens, each spread evenly over orders of magnitude, met by the scheduler's own choice of
shape. Real traffic has other weights (`benchmarks/plan_padding.py` replays some).
"""

from __future__ import annotations

from dataclasses import dataclass

from buckets.plan import Plan
from buckets.shape import StepShape
from tpu_engine.scheduler.choice import ExecutedTokensCost, Prefill, StepCost, choose_step
from tpu_engine.scheduler.limits import SchedulerLimits

# Situations per factor of two, along each of the two axes.
PER_OCTAVE = 4


@dataclass(frozen=True, slots=True)
class Padding:
    """Over the situations in which a shape is chosen.

    Attributes:
        share: of the situations that have work, those that choose this shape.
        mean: of executed tokens, those that are padding.
        worst: the same of the emptiest step.
    """

    share: float
    mean: float
    worst: float


def predict_padding(
    plan: Plan, max_chunk: int | None = None, cost: StepCost | None = None
) -> dict[StepShape, Padding]:
    """Padding of every shape that is chosen in any situation; the others are missing."""
    price = ExecutedTokensCost() if cost is None else cost
    floor = SchedulerLimits(2, 1).min_prefill_tokens
    useful: dict[StepShape, list[int]] = {}
    for decodes in _spread(plan.max_num_seqs):
        for left in _spread(4 * plan.max_num_tokens):
            prefills = [Prefill(0, left, min(left, max_chunk or left))] if left else []
            if prefills and decodes == plan.max_num_seqs:
                continue  # no slot is left for a prompt
            choice = choose_step(plan, decodes, prefills, price, floor)
            if choice is not None:
                useful.setdefault(choice.shape, []).append(decodes + sum(choice.grants))
    total = sum(map(len, useful.values()))
    return {
        shape: Padding(
            share=len(tokens) / total,
            mean=1 - sum(tokens) / (len(tokens) * shape.num_tokens),
            worst=1 - min(tokens) / shape.num_tokens,
        )
        for shape, tokens in useful.items()
    }


def _spread(top: int) -> list[int]:
    """0, 1, ... `top`, the steps growing with the numbers."""
    numbers = {0, top}
    step = 0
    while (number := round(2 ** (step / PER_OCTAVE))) < top:
        numbers.add(number)
        step += 1
    return sorted(numbers)
