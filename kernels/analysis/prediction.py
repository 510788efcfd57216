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
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        steady: path of the steady loop ("0.1"); empty: the loop with most matrix work.
        trips: passes of a loop inside the steady one, per pass of the steady one, by its path
            below it ("0" is its first); 1 where absent.
    """

    block_tokens: int
    blocks_per_pass: int
    num_kv_heads: int
    kv_token_head_bytes: float
    useful_flops: int
    steady: str = ""
    trips: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def token_heads(self) -> int:
        """KV positions times heads per pass."""
        return self.block_tokens * self.blocks_per_pass * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cycles of one pass of the steady loop, loops inside it included.

    Attributes:
        steady: with the optional bodies a steady pass needs.
        longest: with every optional body.
        scheduled, scheduled_longest: the same with result latencies; None if the dump has none.
    """

    steady: int
    longest: int
    scheduled: int | None
    scheduled_longest: int | None


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
    """The loop the facts name, else the one with most matrix work."""
    if not facts.steady:
        return schedule.hot
    found = [loop for loop in schedule.loops if loop.path == facts.steady]
    if not found:
        paths = ", ".join(loop.path for loop in schedule.loops)
        raise ValueError(f"{schedule.name} has no loop {facts.steady!r}, only {paths}")
    return found[0]


def pass_cost(schedule: KernelSchedule, loop: LoopReport, trips: Mapping[str, int]) -> PassCost:
    """One pass of `loop` with the loops inside it, each as often as `trips` says."""
    steady, longest = loop.steady.estimate, loop.longest.estimate
    scheduled, scheduled_longest = loop.scheduled_steady, loop.scheduled
    for child in schedule.children(loop.path):
        place = child.path.removeprefix(f"{loop.path}.")
        inside = {
            path.removeprefix(f"{place}."): count
            for path, count in trips.items()
            if path.startswith(f"{place}.")
        }
        cost, count = pass_cost(schedule, child, inside), trips.get(place, 1)
        steady += count * cost.steady
        longest += count * cost.longest
        if scheduled is not None and cost.scheduled is not None:
            scheduled += count * cost.scheduled
        if scheduled_longest is not None and cost.scheduled_longest is not None:
            scheduled_longest += count * cost.scheduled_longest
    return PassCost(steady, longest, scheduled, scheduled_longest)


def predict(schedule: KernelSchedule, facts: WorkFacts, chip: Chip) -> Prediction:
    """Puts the schedule against what the chip's HBM and matrix units could do."""
    loop = steady_loop(schedule, facts)
    cost = pass_cost(schedule, loop, facts.trips)
    hbm_cycles = facts.kv_token_head_bytes / chip.hbm_bytes_per_cycle
    has_latencies = cost.scheduled is not None and cost.scheduled_longest is not None
    peak_cycles = facts.useful_flops / chip.flops_per_cycle
    return Prediction(
        cycles=cost.steady / facts.token_heads,
        all_in_cycles=cost.longest / facts.token_heads,
        scheduled_cycles=None if cost.scheduled is None else cost.scheduled / facts.token_heads,
        hbm_cycles=hbm_cycles,
        roofline_share=_shares(cost.steady, cost.longest, hbm_cycles, facts),
        scheduled_share=(
            _shares(cost.scheduled or 0, cost.scheduled_longest or 0, hbm_cycles, facts)
            if has_latencies
            else {}
        ),
        useful_flop_share=peak_cycles / cost.steady,
        scheduled_flop_share=None if cost.scheduled is None else peak_cycles / cost.scheduled,
        prologue_us=_prologue_cycles(schedule, loop) / chip.clock_hz * 1e6,
        code_bytes=schedule.num_bundles * BYTES_PER_BUNDLE,
        slot_shares=schedule.hot.slot_shares,
        spills=sum(loop.spills for loop in schedule.loops),
    )


def _shares(steady: int, longest: int, hbm_cycles: float, facts: WorkFacts) -> dict[int, float]:
    """Share of the HBM roofline by context length (module docstring)."""
    shares: dict[int, float] = {}
    for context in CONTEXTS:
        blocks = math.ceil(context / facts.block_tokens)
        cycles = (blocks * steady + longest - steady) / facts.blocks_per_pass
        needed = context * facts.num_kv_heads * hbm_cycles
        shares[context] = min(1.0, needed / cycles)
    return shares


def _prologue_cycles(schedule: KernelSchedule, loop: LoopReport) -> int:
    """Cycles before the outermost loop around the steady one; loops before it count once."""
    outermost = ".".join(loop.path.split(".")[:2])
    return next(other for other in schedule.loops if other.path == outermost).cycles_before
