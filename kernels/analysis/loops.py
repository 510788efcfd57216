"""The control flow of a schedule: its loop nest, and the ways through a loop's body.

Owns which bundles belong to which loop, which can be skipped, and the ways through a body.
Knows nothing of what the instructions do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from operator import add

from kernels.analysis.bundles import Bundle, Listing
from kernels.analysis.dump import DumpError

_MAX_SHARED = 5  # conditions followed through a loop: each doubles the ways to look at
_REGISTER = re.compile(r"(%[a-z]+\d+)_\w+")
# The exit test of a loop that counts from 0 to a constant.
_CONSTANT_END = re.compile(r"scmp\.ge\.s32\S* %\S+, (\d+)")


def _without_register(text: str) -> str:
    """Values without the registers they happen to be in."""
    return _REGISTER.sub(r"\1", text)


@dataclass(slots=True)
class Loop:
    """Bundles `first` to `last`; the root stands for the whole kernel.

    `passes` is how often the body runs each time the loop is reached; None: known at run time.
    """

    first: int
    last: int
    passes: int | None = None
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
        self._definitions = {
            _without_register(one.result): _without_register(f"{one.opcode} {one.operands}")
            for bundle in self.bundles
            for one in bundle.instructions
            if one.result.startswith("%p")
        }
        self.targets: dict[int, int] = {}
        for index, bundle in enumerate(self.bundles):
            branch = bundle.branch
            if branch is not None:
                target = self._starts.get(branch.region or "", branch.bundle)
                if target is not None:  # else it leaves the kernel
                    self.targets[index] = target

    def condition(self, index: int) -> tuple[str, bool] | None:
        """What the branch at `index` depends on and the value it is taken on; None: on nothing.

        Two predicates are the same condition where they are defined alike: compilers compute one
        twice rather than keep it.
        """
        branch = self.bundles[index].branch
        if branch is None or branch.predicate is None:
            return None
        predicate, taken_on = branch.predicate, branch.taken_on
        while (definition := self._definitions.get(predicate, "")).startswith("pneg "):
            predicate, taken_on = definition.split()[1], not taken_on
        return definition or predicate, taken_on

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
            end = self._end_of_loop(index, max(back))
            found.append(Loop(index, end, self._constant_passes(max(back))))
        root = Loop(0, len(self.bundles) - 1, passes=1)
        stack = [root]
        for loop in sorted(found, key=lambda loop: (loop.first, -loop.last)):
            while loop.first > stack[-1].last:
                stack.pop()
            stack[-1].children.append(loop)
            stack.append(loop)
        return root

    def _constant_passes(self, back: int) -> int | None:
        """Passes of the loop that the branch at `back` repeats, where its end is a constant."""
        condition = self.condition(back)
        match = _CONSTANT_END.fullmatch(condition[0]) if condition else None
        return int(match[1]) if match and condition and not condition[1] else None

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

    def way(self, loop: Loop, weights: Sequence[tuple[int, ...]]) -> list[int]:
        """The bundles on the heaviest way from top to bottom, once through each loop inside.

        `weights` are those of all bundles of the listing, most important first; they add up along
        a way. Branches on the same condition agree, so of `when(x)` and `when(not x)` a way takes
        one.
        """
        jumps = self._jumps(loop)
        borders = {loop.first, loop.last + 1, *(leave + 1 for leave in jumps)}
        borders |= {self.targets[branch] for branch in chain.from_iterable(jumps.values())}
        runs = list(pairwise(sorted(borders)))  # straight runs of bundles, end excluded
        totals = [tuple(map(sum, zip(*weights[first:end], strict=True))) for first, end in runs]
        shared = self._shared_conditions(jumps)
        ways = (
            self._way(runs, totals, jumps, dict(zip(shared, values, strict=True)))
            for values in product((False, True), repeat=len(shared))
        )
        return [index for first, end in max(ways)[1] for index in range(first, end)]

    def _way(
        self,
        runs: Sequence[tuple[int, int]],
        weights: Sequence[tuple[int, ...]],
        jumps: Mapping[int, Sequence[int]],
        known: Mapping[str, bool],
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """The heaviest way and its weight, given what is `known` of conditions."""
        first, end = runs[0][0], runs[-1][1]
        heaviest = {end: tuple(0 for _ in weights[0])}
        follower: dict[int, int] = {}
        for (start, stop), weight in zip(reversed(runs), reversed(weights), strict=True):
            followers = self._followers(stop - 1, jumps, known)
            follower[start] = max(followers, key=lambda way: heaviest[way])
            heaviest[start] = tuple(map(add, weight, heaviest[follower[start]]))
        ends = dict(runs)
        way: list[tuple[int, int]] = []
        start = first
        while start < end:
            way.append((start, ends[start]))
            start = follower[start]
        return heaviest[first], way

    def _followers(
        self, index: int, jumps: Mapping[int, Sequence[int]], known: Mapping[str, bool]
    ) -> list[int]:
        """Where control can be after bundle `index`."""
        followers = [index + 1]
        for number in jumps.get(index, ()):
            condition = self.condition(number)
            is_known = condition is None or condition[0] in known
            if condition is None or known.get(*condition) == condition[1]:
                if is_known:
                    followers.clear()
                followers.append(self.targets[number])
        return followers

    def _shared_conditions(self, jumps: Mapping[int, Sequence[int]]) -> list[str]:
        """What more than one forward branch depends on, the most frequent first."""
        conditions = map(self.condition, chain.from_iterable(jumps.values()))
        found = Counter(condition[0] for condition in conditions if condition is not None)
        return [what for what, count in found.most_common(_MAX_SHARED) if count > 1]

    def _jumps(self, loop: Loop) -> dict[int, list[int]]:
        """Forward branches within the loop, by the last bundle of their delay."""
        jumps: dict[int, list[int]] = {}
        for branch in range(loop.first, loop.last + 1):
            target = self.targets.get(branch)
            if target is not None:
                leave = self.after_delay(branch) - 1
                if leave < target <= loop.last + 1:
                    jumps.setdefault(leave, []).append(branch)
        return jumps
