"""The order in which a plan's shapes are warmed: what a server can open with, then what helps most.

Owns that order. Doesn't know how a shape is built nor how long that takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from buckets.plan import Plan, purpose
from buckets.shape import StepShape

# Most steps of a server decode only.
_WEIGHTS = {"decode": 4.0, "prefill": 1.0, "mixed": 1.0}
# What a step costs whatever its size, in tokens: the weights are read.
_OVERHEAD_TOKENS = 16


def opening_shapes(plan: Plan) -> tuple[StepShape, ...]:
    """The fewest shapes to open with: any admissible step fits, and decodes aren't padded to it.

    These are the full shape at the top, and the one with the fewest tokens that holds a decode of
    every sequence (often the same in a small plan).
    """
    seqs = plan.max_num_seqs
    top = plan.smallest_covering(plan.max_num_tokens, seqs, seqs)
    decode = plan.smallest_covering(seqs, seqs, seqs)
    return tuple(dict.fromkeys(shape for shape in (top, decode) if shape is not None))


def warm_order(plan: Plan) -> tuple[StepShape, ...]:
    """Every shape of the plan once: `opening_shapes`, then by what each one saves, greedily.

    A step that fills a shape of the plan exactly stands for the traffic; steps that only decode
    count four times. Until its own shape is warm it runs at the smallest warm one that holds it.
    Each turn takes the shape that lowers the mean cost of these steps, relative to their own
    shapes, the most.
    """
    order = list(opening_shapes(plan))
    costs = {step: min(_cost(step, shape) for shape in order) for step in plan.shapes}
    left = [shape for shape in plan.shapes if shape not in order]
    while left:
        best = max(left, key=lambda shape: _saving(costs, shape))
        costs = {step: min(cost, _cost(step, best)) for step, cost in costs.items()}
        order.append(best)
        left.remove(best)
    return tuple(order)


def _saving(costs: Mapping[StepShape, float], shape: StepShape) -> float:
    """How much of the steps' `costs` goes once `shape` is warm."""
    return sum(max(0.0, cost - _cost(step, shape)) for step, cost in costs.items())


def _cost(step: StepShape, shape: StepShape) -> float:
    """Of running a step that fills `step` at `shape`, relative to its own; infinite: can't."""
    holds = (
        shape.variant in ("full", step.variant)
        and shape.num_tokens >= step.num_tokens
        and shape.num_seqs >= step.num_seqs
        and shape.num_logit_rows >= step.num_logit_rows
    )
    if not holds:
        return math.inf
    ratio = (shape.num_tokens + _OVERHEAD_TOKENS) / (step.num_tokens + _OVERHEAD_TOKENS)
    return _WEIGHTS[purpose(step)] * ratio
