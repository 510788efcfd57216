"""The control flow of a schedule: its loop nest, and the ways through a loop's body.

Owns which bundles belong to which loop, which can be skipped, and the longest way through.
Knows nothing of what the instructions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernels.analysis.bundles import Bundle, Listing
from kernels.analysis.dump import DumpError


@dataclass(slots=True)
class Loop:
    """Bundles `first` to `last`; the root stands for the whole kernel."""

    first: int
    last: int
    children: list[Loop] = field(default_factory=list["Loop"])

    def own(self) -> list[int]:
        """Its bundles without those of the loops inside."""
        indices: list[int] = []
        start = self.first
        for child in self.children:
            indices += range(start, child.first)
            start = child.last + 1
        return [*indices, *range(start, self.last + 1)]


@dataclass(frozen=True, slots=True)
class OptionalBody:
    """Bundles `first` to `last` that the branch at `branch` may jump over."""

    branch: int
    first: int
    last: int


class Flow:
    """Branch targets and delay slots of one listing.

    `is_squeezed` says that runs of empty bundles stand in the listing as one, as libtpu does for
    v7x in its final bundles: there a delay ends with the first empty bundle.
    """

    def __init__(self, listing: Listing, delay_slots: int, *, is_squeezed: bool) -> None:
        self.bundles: Sequence[Bundle] = listing.bundles
        self._path = listing.path
        self._delay_slots = delay_slots
        self._is_squeezed = is_squeezed
        self._starts: dict[str, int] = {}
        for index, bundle in enumerate(self.bundles):
            for region in bundle.starts:
                self._starts.setdefault(region, index)
        self.targets: dict[int, int] = {}
        for index, bundle in enumerate(self.bundles):
            branch = bundle.branch
            if branch is not None:
                target = self._starts.get(branch.region or "", branch.bundle)
                if target is not None:  # else it leaves the kernel
                    self.targets[index] = target

    def after_delay(self, branch: int) -> int:
        """The first bundle that a taken branch does not issue."""
        end = min(branch + self._delay_slots, len(self.bundles) - 1)
        if self._is_squeezed:
            for index in range(branch + 1, end + 1):
                if self.bundles[index].is_empty or self.bundles[index].marks:
                    return index + self.bundles[index].is_empty
        return end + 1

    def loops(self) -> Loop:
        """The loop nest below a root that spans the kernel."""
        found: list[Loop] = []
        for index, bundle in enumerate(self.bundles):
            if not bundle.marks & {"LB", "LH"}:
                continue
            back = [branch for branch, target in self.targets.items() if target == index <= branch]
            if not back:
                raise DumpError(self._path, f"no branch back to the loop at bundle {index:#x}")
            found.append(Loop(index, self._end_of_loop(index, max(back))))
        root = Loop(0, len(self.bundles) - 1)
        stack = [root]
        for loop in sorted(found, key=lambda loop: (loop.first, -loop.last)):
            while loop.first > stack[-1].last:
                stack.pop()
            stack[-1].children.append(loop)
            stack.append(loop)
        return root

    def _end_of_loop(self, first: int, back: int) -> int:
        """The last delay slot of the branch `back`; where squeezed, the end of its region."""
        end = min(back + self._delay_slots, len(self.bundles) - 1)
        if not self._is_squeezed:
            return end
        for index in range(back, end + 1):
            if index > back and self.bundles[index].marks:
                return index - 1
            if self.bundles[index].ends & self.bundles[first].starts:
                return index
        return end

    def optional_bodies(self, loop: Loop) -> list[OptionalBody]:
        """What conditional branches of the loop itself (not of loops inside) can jump over."""
        bodies: list[OptionalBody] = []
        for index in loop.own():
            target = self.targets.get(index)
            branch = self.bundles[index].branch
            if target is None or branch is None or not branch.is_conditional:
                continue
            first = self.after_delay(index)
            if first < target <= loop.last + 1:
                bodies.append(OptionalBody(index, first, target - 1))
        return bodies

    def longest_way(
        self, loop: Loop, cycles: Callable[[int], int], skipped: Sequence[OptionalBody] = ()
    ) -> list[int]:
        """The bundles of the loop itself on its longest way, given bodies that are jumped over.

        Of the two sides of an if/else the longer one is on it.
        """
        own = set(loop.own())
        skipping = {body.branch for body in skipped}
        jumps = self._jumps(loop)
        cost = [0] * (loop.last - loop.first + 2)
        follower: dict[int, int] = {}
        for index in range(loop.last, loop.first - 1, -1):
            ways = [index + 1]
            for branch, target in jumps.get(index, ()):
                conditional = self.bundles[branch].branch
                if branch in skipping or (conditional and not conditional.is_conditional):
                    ways = [target]
                else:
                    ways.append(target)
            best = max(ways, key=lambda way: cost[way - loop.first])
            follower[index] = best
            here = cycles(index) if index in own else 0
            cost[index - loop.first] = here + cost[best - loop.first]
        way: list[int] = []
        index = loop.first
        while index <= loop.last:
            way.append(index)
            index = follower[index]
        return [index for index in way if index in own]

    def _jumps(self, loop: Loop) -> dict[int, list[tuple[int, int]]]:
        """Forward branches within the loop, by the last bundle of their delay."""
        jumps: dict[int, list[tuple[int, int]]] = {}
        for branch in range(loop.first, loop.last + 1):
            target = self.targets.get(branch)
            if target is not None:
                leave = self.after_delay(branch) - 1
                if leave < target <= loop.last + 1:
                    jumps.setdefault(leave, []).append((branch, target))
        return jumps
