"""The compiler's tables beside a schedule: slots used per bundle, and memory allocated.

Owns the syntax of the two files. Knows nothing of bundles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernels.analysis.dump import DumpError, read_lines

SLOT_NAMES = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")

_ALLOCATION = re.compile(r" *#allocation(\d+) \[(.*)\]")
_SPACE = re.compile(r"space=(\w+)")
_SIZE = re.compile(r"\bsize = (0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True)
class SlotUse:
    """How many slots of each kind a bundle has, and how many each bundle uses.

    `FILL` and `SPILL` are the part of VLOAD and VSTORE that moves spilled registers.
    """

    capacity: dict[str, int]
    used: tuple[dict[str, int], ...]


def read_slot_use(path: Path) -> SlotUse:
    """Parses a utilisation table; raises `DumpError` where a row doesn't fit its header."""
    columns: list[str] = []
    rows: list[dict[str, int]] = []
    for number, line in enumerate(read_lines(path), start=1):
        if "," in line:
            columns = [name.strip().rpartition(":")[2] for name in line.split(",")]
        elif (numbers := line.split()) and all(text.isdigit() for text in numbers):
            if len(numbers) != len(columns):
                raise DumpError(path, f"{len(numbers)} numbers for {len(columns)} columns", number)
            rows.append(_with_mxu(dict(zip(columns, map(int, numbers), strict=True))))
    if not rows or any(name not in rows[0] for name in SLOT_NAMES):
        raise DumpError(path, f"not a table of {', '.join(SLOT_NAMES)}")
    return SlotUse(rows[0], tuple(rows[1:]))


def _with_mxu(row: dict[str, int]) -> dict[str, int]:
    """Newer compilers count matmuls and weight pushes apart; both are the matrix units' slots."""
    if "MXU" not in row and {"MATMUL", "MATPUSH"} <= row.keys():
        return {"MXU": row["MATMUL"] + row["MATPUSH"], **row}
    return row


def read_allocations(path: Path) -> dict[str, int]:
    """Bytes the kernel takes for itself, by memory space ("vmem", "smem", "sflag").

    Fixed addresses outside the kernel's own space (the core index and the like) are left out.
    """
    total: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        match = _ALLOCATION.match(line)
        if match is None or "fixed_abs" in match[2]:
            continue
        space, size = _SPACE.search(match[2]), _SIZE.search(match[2])
        if space is None or size is None:
            raise DumpError(path, f"allocation {match[1]} has no space or size", number)
        total[space[1]] = total.get(space[1], 0) + int(size[1], 0)
    return total
