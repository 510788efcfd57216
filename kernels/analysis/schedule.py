"""One kernel's schedule, measured: a record per loop, with cycles, units, slots, DMAs and spills.

    cycles     bundles + delays of the final listing
    estimate   max(cycles, busiest matrix unit, busiest cross-lane unit)
    scheduled  bundles of the listing before the compiler drops the empty ones that interlocks
               stand in for: the same loop with the latency of every result. None where the dump
               lacks that pass.

`estimate` is a bound set by slots and units, what a loop costs if its latencies are hidden;
`scheduled` is what the compiler itself expects of one pass. Waits (for DMAs, semaphores) are
counted, not costed: how long they last is not static.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.analysis.bundles import Bundle, Listing, read_listing
from kernels.analysis.dump import DumpError, KernelFiles
from kernels.analysis.loops import Flow, Loop, OptionalBody
from kernels.analysis.machine import MACHINES, Machine, machine_of
from kernels.analysis.occupancy import Occupancy, occupancy
from kernels.analysis.tables import SlotUse, read_allocations, read_slot_use

CUSTOM_CALL = "custom-call"  # what a Pallas kernel is to the program around it
_MATRIX_WORK = ("vmatmul", "vmatpush")
_READ = "dma.hbm_to"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A DMA start: its kind ("hbm_to_vmem"), bytes (None: known at run time), and condition."""

    kind: str
    num_bytes: int | None
    is_predicated: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run of bundles takes."""

    bundles: int
    cycles: int
    units: Occupancy

    @property
    def estimate(self) -> int:
        return max(self.cycles, self.units.mxu_cycles, self.units.xlu_cycles)


@dataclass(frozen=True, slots=True)
class BodyReport:
    """An optional body: its bundles, its cost, and what it has that tells what it is for."""

    first: int
    last: int
    cost: Cost
    has_matmul: bool
    reads_hbm: bool
    writes_hbm: bool


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop without the loops inside it.

    Attributes:
        path: "0" is the kernel, "0.1" its second loop, "0.1.0" the first loop inside that.
        first, last: its bundles.
        passes: of its body each time it is reached; None: known at run time only.
        all_in: cost of all its bundles, both sides of every branch.
        longest: of its longest way (of an if/else the longer side).
        steady: of the shortest way that misses no matrix work and no DMA from HBM: past what runs
            now and then (masks of edge blocks, a sequence's end), not past what feeds the loop.
        scheduled, scheduled_steady: the same two ways, longest and steady, with latencies.
        cycles_before: cycles of all bundles before it, with latencies where the dump has them.
        is_on_steady_way: whether the steady way of the loop around leads through it.
        slots: slots used, and capacity times bundles, by slot.
        spills, fills: registers stored to and loaded from VMEM because there were too few.
    """

    path: str
    depth: int
    first: int
    last: int
    passes: int | None
    all_in: Cost
    longest: Cost
    steady: Cost
    scheduled: int | None
    scheduled_steady: int | None
    cycles_before: int
    is_on_steady_way: bool
    bodies: tuple[BodyReport, ...]
    transfers: tuple[Transfer, ...]
    num_waits: int
    slots: dict[str, int]
    slot_shares: dict[str, float]

    @property
    def spills(self) -> int:
        return self.slots["SPILL"]

    @property
    def fills(self) -> int:
        return self.slots["FILL"]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """All that is read of one kernel; `loops[0]` is the kernel outside its loops."""

    name: str
    kind: str
    machine: Machine
    num_bundles: int
    num_scheduled: int | None
    memory: dict[str, int]
    loops: tuple[LoopReport, ...]

    def children(self, path: str) -> list[LoopReport]:
        return [loop for loop in self.loops if loop.parent == path]

    @property
    def has_latencies(self) -> bool:
        """Whether the dump had the listing with the latency of every result, of the same loops."""
        return self.loops[0].scheduled is not None

    @property
    def hot(self) -> LoopReport:
        """The loop whose own bundles hold most matrix work; of equals the innermost."""
        return max(self.loops, key=lambda loop: (loop.all_in.units.mxu_cycles, loop.depth))


def read_schedule(files: KernelFiles, *, chip: str | None = None) -> KernelSchedule:
    """Reads one kernel of a dump; `chip` overrides what the listing says of its machine."""
    listing = read_listing(files.final)
    if files.slots is None:
        raise DumpError(files.final, "its utilisation table is missing from the dump")
    use = read_slot_use(files.slots)
    if len(use.used) != len(listing.bundles):
        what = f"{len(use.used)} rows for {len(listing.bundles)} bundles"
        raise DumpError(files.slots, what)
    machine = machine_of(use.capacity, listing)
    if chip is not None:
        machine = next(m for m in MACHINES if chip in m.chips)
    timed = None if files.timed is None else read_listing(files.timed)
    return KernelSchedule(
        name=listing.name or files.name,
        kind=listing.kind,
        machine=machine,
        num_bundles=len(listing.bundles),
        num_scheduled=None if timed is None else len(timed.bundles),
        memory={} if files.allocations is None else read_allocations(files.allocations),
        loops=tuple(_loop_reports(listing, timed, use, machine)),
    )


def _loop_reports(
    listing: Listing, timed: Listing | None, use: SlotUse, machine: Machine
) -> Iterator[LoopReport]:
    flow = Flow(listing, machine.delay_slots, is_squeezed="tpu7x" in machine.chips)
    nest, ways = list(_walk(flow.loops())), _Ways(flow)
    scheduled = [_Scheduled(None, None, ways.cycles_before(nested.loop)) for nested in nest]
    if timed is not None:
        later = Flow(timed, machine.delay_slots, is_squeezed=False)
        twins = list(_walk(later.loops()))
        if [twin.path for twin in twins] == [nested.path for nested in nest]:
            later_ways = _Ways(later)
            scheduled = [later_ways.scheduled(twin.loop) for twin in twins]
    for nested, later_cycles in zip(nest, scheduled, strict=True):
        yield _report(ways, nested, use, machine, later_cycles)


class _Nested(NamedTuple):
    """A loop, where it is in the nest, and the loop around it."""

    path: str
    loop: Loop
    around: Loop | None


def _walk(loop: Loop, path: str = "0", around: Loop | None = None) -> Iterator[_Nested]:
    yield _Nested(path, loop, around)
    for number, child in enumerate(loop.children):
        yield from _walk(child, f"{path}.{number}", loop)


class _Scheduled(NamedTuple):
    """Cycles of a loop's longest and steady way, and of all bundles before the loop."""

    longest: int | None
    steady: int | None
    before: int


class _Ways:
    """The longest and the steady way through each loop of a listing."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._cycles = [bundle.cycles for bundle in flow.bundles]
        self._long = [(cycles,) for cycles in self._cycles]
        self._steady = [
            (sum(i.opcode.startswith((*_MATRIX_WORK, _READ)) for i in bundle.instructions), -cycles)
            for bundle, cycles in zip(flow.bundles, self._cycles, strict=True)
        ]
        self._found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def both(self, loop: Loop) -> tuple[list[int], list[int]]:
        """Bundles of the longest way and of the steady one, loops inside included."""
        place = loop.first, loop.last
        if place not in self._found:
            found = self.flow.way(loop, self._long), self.flow.way(loop, self._steady)
            self._found[place] = found
        return self._found[place]

    def own(self, loop: Loop) -> tuple[list[int], list[int]]:
        """The same without the loops inside."""
        own = set(loop.own())
        longest, steady = self.both(loop)
        return [i for i in longest if i in own], [i for i in steady if i in own]

    def scheduled(self, loop: Loop) -> _Scheduled:
        longest, steady = (sum(self._cycles[i] for i in way) for way in self.own(loop))
        return _Scheduled(longest, steady, self.cycles_before(loop))

    def cycles_before(self, loop: Loop) -> int:
        return sum(self._cycles[: loop.first])


def _report(
    ways: _Ways, nested: _Nested, use: SlotUse, machine: Machine, scheduled: _Scheduled
) -> LoopReport:
    bundles = ways.flow.bundles

    def cost(indices: Iterable[int]) -> Cost:
        run = [bundles[i] for i in indices]
        return Cost(len(run), sum(b.cycles for b in run), occupancy(run, machine))

    loop, own, around = nested.loop, nested.loop.own(), nested.around
    own_bundles = [bundles[i] for i in own]
    longest, steady = ways.own(loop)
    slots = {name: sum(use.used[i][name] for i in own) for name in use.capacity}
    return LoopReport(
        path=nested.path,
        depth=nested.path.count("."),
        first=loop.first,
        last=loop.last,
        passes=loop.passes,
        all_in=cost(own),
        longest=cost(longest),
        steady=cost(steady),
        scheduled=scheduled.longest,
        scheduled_steady=scheduled.steady,
        cycles_before=scheduled.before,
        is_on_steady_way=around is None or loop.first in ways.both(around)[1],
        bodies=tuple(
            _body_report(bundles[body.first : body.last + 1], body, machine)
            for body in ways.flow.optional_bodies(loop)
        ),
        transfers=tuple(_transfers(own_bundles, machine)),
        num_waits=sum(i.is_wait for bundle in own_bundles for i in bundle.instructions),
        slots=slots,
        slot_shares={n: used / max(1, len(own) * use.capacity[n]) for n, used in slots.items()},
    )


def _body_report(run: Sequence[Bundle], body: OptionalBody, machine: Machine) -> BodyReport:
    cost = Cost(len(run), sum(bundle.cycles for bundle in run), occupancy(run, machine))
    return BodyReport(body.first, body.last, cost, *_purpose(run))


def _purpose(bundles: Iterable[Bundle]) -> tuple[bool, bool, bool]:
    """Whether the bundles multiply matrices, read HBM, write HBM."""
    codes = {instruction.opcode for bundle in bundles for instruction in bundle.instructions}
    return (
        any(code.startswith(_MATRIX_WORK) for code in codes),
        any(code.startswith(_READ) for code in codes),
        any(code.startswith("dma.") and code.endswith("to_hbm") for code in codes),
    )


def _transfers(bundles: Iterable[Bundle], machine: Machine) -> Iterator[Transfer]:
    for bundle in bundles:
        for instruction in bundle.instructions:
            if instruction.is_transfer:
                granules = instruction.granules
                yield Transfer(
                    instruction.opcode.removeprefix("dma."),
                    None if granules is None else granules * machine.granule_bytes,
                    instruction.is_predicated,
                )
