"""How long a run of bundles keeps the matrix units and the cross-lane units busy.

Bundles may be packed denser than these units drain; the core then stalls. Matmuls and weight pushes
overlap (weights are double-buffered), so a matrix unit's time is the longer of the two sums.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kernels.analysis.bundles import Bundle
from kernels.analysis.machine import Machine

_UNIT = re.compile(r"\.?(mxu|xlu)(\d)$")
_EIGHT_BITS = re.compile(r"\.(s8|u8|s4|u4|f8)")
_ROWS = {4: 8, 2: 16, 1: 32}  # rows of one register, by bytes of an element


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Cycles of the busiest unit of each kind.

    Attributes:
        matmul_cycles, push_cycles: of the busiest matrix unit.
        xlu_cycles: of the busiest cross-lane unit.
        matmul_rows: rows all matrix units took.
    """

    matmul_cycles: int
    push_cycles: int
    xlu_cycles: int
    matmul_rows: int

    @property
    def mxu_cycles(self) -> int:
        return max(self.matmul_cycles, self.push_cycles)


def occupancy(bundles: Iterable[Bundle], machine: Machine) -> Occupancy:
    """Adds up the operations of `bundles`, unit by unit."""
    matmul: Counter[str] = Counter()
    push: Counter[str] = Counter()
    xlu: Counter[str] = Counter()
    rows = 0
    for bundle in bundles:
        for instruction in bundle.instructions:
            code = instruction.opcode
            unit = _UNIT.search(code)
            if unit is None:
                continue
            size = 1 if _EIGHT_BITS.search(code) else 2 if ".bf16" in code else 4
            if unit[1] == "xlu":
                xlu[unit[2]] += 0 if code.startswith("vpop") else machine.xlu_cycles
            elif code.startswith("vmatmul"):
                # A packed left operand that two units share goes in as halves, one per operation:
                # schedules space these 8 cycles apart, and only so do the rows add up.
                parts = 2 if size == 2 and ".lmr." in code else 1
                matmul[unit[2]] += machine.matmul_cycles[size] // parts
                rows += _ROWS[size] // parts
            elif code.startswith("vmatpush"):
                push[unit[2]] += machine.push_cycles[size]
    busiest = (max(counts.values(), default=0) for counts in (matmul, push, xlu))
    return Occupancy(*busiest, matmul_rows=rows)
