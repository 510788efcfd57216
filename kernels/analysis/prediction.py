"""What a schedule says about speed: shares of the HBM and matrix-unit rooflines.

Owns the arithmetic from cycles to shares. A kernel states what its loops get done (`WorkFacts`);
this module knows no kernel. All of it is static prediction: DMA latency, real HBM efficiency,
bank conflicts and the outcome of branches are invisible here.

    context of n tokens, one sequence, decode:

    cycles(n) = ceil(n / block) * steady / blocks per pass     whole blocks, whatever n is
              + (longest - steady) / blocks per pass           optional bodies, once per sequence
    share(n)  = min(1, cycles HBM needs for n tokens / cycles(n))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.analysis.schedule import KernelSchedule, LoopReport
from kernels.chips import Chip

CONTEXTS = (130, 256, 257, 512, 1024, 2048, 4096, 8192)

# Program bytes per bundle, measured over many kernels (80 to 90); the compiler's own size of an
# executable also holds a fixed part that differs between its versions.
BYTES_PER_BUNDLE = 85


@dataclass(frozen=True, slots=True)
class WorkFacts:
    """What one pass of a kernel's steady loop gets done, as the kernel states it.

    Attributes:
        block_tokens: KV positions of the smallest unit it computes.
        blocks_per_pass: such units per pass.
        num_kv_heads: KV heads a pass covers.
        kv_token_head_bytes: HBM bytes of one KV position of one head, K and V together.
        useful_flops: of one pass when nothing in it is masked.
        inner_passes: passes of the loops between the steady one and the hot one (the one with
            most matrix work), from the outermost in, per pass of the one around; empty where the
            hot loop is the steady one.
    """

    block_tokens: int
    blocks_per_pass: int
    num_kv_heads: int
    kv_token_head_bytes: float
    useful_flops: int
    inner_passes: tuple[int, ...] = ()

    @property
    def token_heads(self) -> int:
        """KV positions times heads per pass."""
        return self.block_tokens * self.blocks_per_pass * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a whole call gets done, as the kernel states it: for kernels that mask and skip blocks.

    Attributes:
        items: passes of the loop around the steady one.
        blocks: passes of the steady loop in which nothing is masked.
        masked_blocks: passes with a mask (diagonal, window, ragged rows).
        useful_flops: of what the queries really see.
        hbm_bytes: KV read, new rows, queries and output.
    """

    items: int
    blocks: int
    masked_blocks: int
    useful_flops: int
    hbm_bytes: int


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A whole call: cycles, and shares of the nearer roofline and of the matrix units' peak."""

    cycles: int
    roofline_share: float
    useful_flop_share: float


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cycles of one pass of the steady loop, loops inside it included.

    Attributes:
        steady: with the optional bodies a steady pass needs.
        longest: with every optional body, but not the loops in those bodies.
        beside: the loops in optional bodies, each once for as many passes as it has.
    """

    steady: int
    longest: int
    beside: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of one kernel on one chip; cycles are per KV position and head."""

    cycles: float
    all_in_cycles: float
    scheduled_cycles: float | None
    hbm_cycles: float
    roofline_share: dict[int, float]
    scheduled_share: dict[int, float]
    useful_flop_share: float
    scheduled_flop_share: float | None
    prologue_us: float
    code_bytes: int
    slot_shares: dict[str, float]
    spills: int


def steady_loop(schedule: KernelSchedule, facts: WorkFacts) -> LoopReport:
    """The loop that is as far above the hot one as the facts say."""
    steps = schedule.hot.path.split(".")
    above = len(facts.inner_passes)
    if above >= len(steps):
        raise ValueError(f"{schedule.name}: only {len(steps) - 1} loops lead to its hot one")
    path = ".".join(steps[: len(steps) - above])
    return next(loop for loop in schedule.loops if loop.path == path)


def pass_cost(
    schedule: KernelSchedule, loop: LoopReport, inner: Sequence[int], *, latencies: bool = False
) -> PassCost:
    """One pass of `loop` with the loops inside it, those towards the hot one `inner` times.

    Other loops run as often as their exit test says, or once where that is known at run time only.
    """
    steady, longest, beside = loop.steady.estimate, loop.longest.estimate, 0
    if latencies:
        steady, longest = loop.scheduled_steady or 0, loop.scheduled or 0
    for child in schedule.children(loop.path):
        leads_on = bool(inner) and f"{schedule.hot.path}.".startswith(f"{child.path}.")
        cost = pass_cost(schedule, child, inner[1:] if leads_on else (), latencies=latencies)
        count = inner[0] if leads_on else child.passes or 1
        if child.is_on_steady_way:
            steady += count * cost.steady
            longest += count * cost.longest
            beside += count * cost.beside
        else:
            beside += count * (cost.longest + cost.beside)
    return PassCost(steady, longest, beside)


def predict(schedule: KernelSchedule, facts: WorkFacts, chip: Chip) -> Prediction:
    """Puts the schedule against what the chip's HBM and matrix units could do."""
    loop = steady_loop(schedule, facts)
    cost, later = pass_cost(schedule, loop, facts.inner_passes), None
    if schedule.has_latencies:
        later = pass_cost(schedule, loop, facts.inner_passes, latencies=True)
    hbm_cycles = facts.kv_token_head_bytes / chip.hbm_bytes_per_cycle
    peak_cycles = facts.useful_flops / chip.flops_per_cycle
    return Prediction(
        cycles=cost.steady / facts.token_heads,
        all_in_cycles=(cost.longest + cost.beside) / facts.token_heads,
        scheduled_cycles=None if later is None else later.steady / facts.token_heads,
        hbm_cycles=hbm_cycles,
        roofline_share=_shares(cost, hbm_cycles, facts),
        scheduled_share={} if later is None else _shares(later, hbm_cycles, facts),
        useful_flop_share=peak_cycles / cost.steady,
        scheduled_flop_share=None if later is None else peak_cycles / later.steady,
        prologue_us=_prologue_cycles(schedule, loop) / chip.clock_hz * 1e6,
        code_bytes=schedule.num_bundles * BYTES_PER_BUNDLE,
        slot_shares=schedule.hot.slot_shares,
        spills=sum(loop.spills for loop in schedule.loops),
    )


def predict_step(
    schedule: KernelSchedule, facts: WorkFacts, step: StepFacts, chip: Chip
) -> dict[str, StepPrediction]:
    """A whole call, edges included: "final" by slots and units, "scheduled" with latencies.

    A masked block costs the loop's longest way. An item costs the longest way of the loop around
    it with all loops in there, and once the loops in the optional bodies of the steady loop.
    """
    loop = steady_loop(schedule, facts)
    around = next(other for other in schedule.loops if other.path == loop.parent)
    found: dict[str, StepPrediction] = {}
    for name in ("final", "scheduled") if schedule.has_latencies else ("final",):
        latencies = name == "scheduled"
        cost = pass_cost(schedule, loop, facts.inner_passes, latencies=latencies)
        outer = pass_cost(schedule, around, (0, *facts.inner_passes), latencies=latencies)
        item = outer.longest + outer.beside + cost.beside
        cycles = step.items * item + step.blocks * cost.steady + step.masked_blocks * cost.longest
        peak = step.useful_flops / chip.flops_per_cycle
        needed = max(peak, step.hbm_bytes / chip.hbm_bytes_per_cycle)
        found[name] = StepPrediction(cycles, min(1.0, needed / cycles), peak / cycles)
    return found


def _shares(cost: PassCost, hbm_cycles: float, facts: WorkFacts) -> dict[int, float]:
    """Share of the HBM roofline by context length (module docstring)."""
    shares: dict[int, float] = {}
    for context in CONTEXTS:
        blocks = math.ceil(context / facts.block_tokens)
        optional = cost.longest + cost.beside - cost.steady
        cycles = (blocks * cost.steady + optional) / facts.blocks_per_pass
        needed = context * facts.num_kv_heads * hbm_cycles
        shares[context] = min(1.0, needed / cycles)
    return shares


def _prologue_cycles(schedule: KernelSchedule, loop: LoopReport) -> int:
    """Cycles before the outermost loop around the steady one; loops before it count once."""
    outermost = ".".join(loop.path.split(".")[:2])
    return next(other for other in schedule.loops if other.path == outermost).cycles_before
