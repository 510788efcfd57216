"""The text of a VLIW schedule as bundles of instructions.

Owns the syntax of libtpu's bundle listings. One bundle issues per cycle. Knows nothing of units,
loops or time beyond the delays written in the listing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernels.analysis.dump import DumpError, read_lines

_BUNDLE = re.compile(r" *(0x[0-9a-f]+|\d+) *((?:(?:LH|LB|LE|PB|PF|CT)\b[ ,]*)*):([ >]*)(\{.*)")
_LABEL = re.compile(r"/\*(\w+=)\*/")  # names an operand; every other comment is talk
_COMMENT = re.compile(r"/\*.*?\*/")
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_ROOT = re.compile(r"/\* (?:entry|exit) bundle: (?:ROOT )?%(\S+) = (?:.*? )?([a-z][a-z-]*)\(")
_INSTRUCTION = re.compile(r"(?:(%\S+) = )?([a-z](?:[\w.-]|\[\d+\])*)(.*)")
_BRANCH = re.compile(r"target (?:= \$region(?P<region>\d+)|bundleno = (?P<bundle>\d+))")
_GRANULES = re.compile(r"size_in_granules=(\d+)")
_CYCLES = re.compile(r"^ *(\d+)")
_PREDICATE = re.compile(r"\((!?)(%p\d+)\w*\)")  # without its register, which gets reused


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a branch goes: the start of a region, or (before the last pass) a bundle.

    It is taken when `predicate` has the value `taken_on`; always, where there is no predicate.
    """

    predicate: str | None
    taken_on: bool
    region: str | None
    bundle: int | None

    @property
    def is_conditional(self) -> bool:
        return self.predicate is not None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One slot of a bundle: what it defines (empty: nothing), `opcode`, the rest of its text."""

    result: str
    opcode: str
    operands: str

    @property
    def branch(self) -> Branch | None:
        """None for anything that isn't a branch within the kernel."""
        if not self.opcode.startswith("sbr."):
            return None
        match = _BRANCH.search(self.operands)
        if match is None:
            return None
        condition = _PREDICATE.search(self.operands)
        return Branch(
            predicate=condition[2] if condition else None,
            taken_on=condition is None or not condition[1],
            region=match["region"],
            bundle=None if match["bundle"] is None else int(match["bundle"]),
        )

    @property
    def is_transfer(self) -> bool:
        """Whether it starts a DMA."""
        return self.opcode.startswith("dma.") and "wait" not in self.opcode

    @property
    def is_wait(self) -> bool:
        """Whether it waits for a DMA or a semaphore, for as long as it takes."""
        return self.opcode.startswith(("dma.done.wait", "vsyncwait", "swait", "sfence.wait"))

    @property
    def granules(self) -> int | None:
        """Size of a transfer in the chip's granules, if the size is a constant."""
        match = _GRANULES.search(self.operands)
        return int(match[1]) if match else None

    @property
    def is_predicated(self) -> bool:
        return _PREDICATE.search(self.operands) is not None

    @property
    def delay(self) -> int:
        """Cycles it holds the core beyond its own."""
        if self.opcode not in ("vdelay", "snop", "vnop"):
            return 0
        match = _CYCLES.match(self.operands)
        return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """What issues in one cycle, and the control-flow marks of the listing.

    Attributes:
        marks: any of LH, LB, LE (loop header, body, exit), PB, PF (predicated), CT (target).
        starts, ends: regions that begin or end with this bundle.
    """

    marks: frozenset[str]
    instructions: tuple[Instruction, ...]
    starts: frozenset[str]
    ends: frozenset[str]

    @property
    def cycles(self) -> int:
        return 1 + sum(instruction.delay for instruction in self.instructions)

    @property
    def branch(self) -> Branch | None:
        return next((branch for i in self.instructions if (branch := i.branch)), None)

    @property
    def is_empty(self) -> bool:
        return not self.instructions


@dataclass(frozen=True, slots=True)
class Listing:
    """One kernel's schedule.

    Attributes:
        path: the file it was read from.
        name, kind: the instruction of the program it implements ("custom-call" for Pallas), empty
            where the listing doesn't say.
    """

    path: Path
    name: str
    kind: str
    bundles: tuple[Bundle, ...]


def read_listing(path: Path) -> Listing:
    """Parses a bundle listing; raises `DumpError` where its bundles are not 0, 1, 2, ..."""
    name = kind = ""
    bundles: list[Bundle] = []
    marks, pending, first_line = frozenset[str](), "", 0

    def finish() -> None:
        if pending:
            bundles.append(_bundle(path, first_line, marks, pending))

    for number, line in enumerate(read_lines(path), start=1):
        match = _BUNDLE.match(line)
        if match is None:
            pending += f" {line.strip()}" if pending else ""  # a long comment, wrapped
        else:
            finish()
            if int(match[1], 0) != len(bundles):
                raise DumpError(path, f"bundle {match[1]} where {len(bundles):#x} was due", number)
            marks = frozenset(match[2].replace(",", " ").split())
            pending, first_line = match[4], number
        root = _ROOT.search(line)
        if root:
            name, kind = root[1], root[2]
    finish()
    if not bundles:
        raise DumpError(path, "no bundles")
    return Listing(path, name, kind, tuple(bundles))


def _bundle(path: Path, line: int, marks: frozenset[str], text: str) -> Bundle:
    starts: set[str] = set()
    ends: set[str] = set()
    for what, region in _REGION.findall(text):
        if what != "End":
            starts.add(region)
        if what != "Start":
            ends.add(region)
    code = _COMMENT.sub("", _LABEL.sub(r"\1", text)).strip()
    if not (code.startswith("{") and code.endswith("}")):
        raise DumpError(path, "a bundle without its closing brace", line)
    instructions: list[Instruction] = []
    for part in code[1:-1].split(";;"):
        if part := part.strip():
            match = _INSTRUCTION.fullmatch(part)
            if match is None:
                raise DumpError(path, f"not an instruction: {part[:60]}", line)
            instructions.append(Instruction(match[1] or "", match[2], match[3].strip()))
    return Bundle(marks, tuple(instructions), frozenset(starts), frozenset(ends))
