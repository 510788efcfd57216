"""What a schedule must know of the machine it is for: unit rates, branch delay, DMA granule.

Owns these figures and the recognition of a machine from a listing. The rates are how long an
operation holds its unit, as seen in the closest spacing the compiler leaves between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.analysis.bundles import Listing


@dataclass(frozen=True, slots=True)
class Machine:
    """One family of TensorCores.

    Attributes:
        chips: the chips that have it.
        num_mxus: matrix units per core.
        matmul_cycles: of one matmul instruction, by bytes of an operand element (4, 2, 1).
        push_cycles: of pushing one register of weights, likewise.
        xlu_cycles: of one cross-lane operation (transpose, rotation, reduction across lanes).
        delay_slots: bundles after a branch that issue whether it is taken or not.
        granule_bytes: unit in which a listing counts a DMA's size.
    """

    chips: tuple[str, ...]
    num_mxus: int
    matmul_cycles: Mapping[int, int]
    push_cycles: Mapping[int, int]
    xlu_cycles: int
    delay_slots: int
    granule_bytes: int


_PUSH = {4: 2, 2: 4, 1: 4}  # a packed register holds two or four rows per sublane

MACHINES = (
    Machine(("v4",), 4, {4: 8, 2: 16, 1: 16}, _PUSH, 8, 1, 512),
    Machine(("v5e", "v5p"), 4, {4: 8, 2: 16, 1: 16}, _PUSH, 8, 4, 32),
    Machine(("v6e",), 2, {4: 4, 2: 8, 1: 8}, _PUSH, 4, 4, 32),
    Machine(("tpu7x",), 2, {4: 4, 2: 8, 1: 8}, _PUSH, 4, 6, 32),
)


def machine_of(capacity: Mapping[str, int], listing: Listing) -> Machine:
    """Recognises the machine by its slots per bundle; v7x by where its matmuls put results."""
    v4, v5, v6e, v7x = MACHINES
    if capacity["MXU"] == v4.num_mxus:
        return v4 if capacity["VLOAD"] == 1 else v5
    has_result_buffer = any(
        "matmul" in i.opcode and ".mrb[" in i.opcode
        for b in listing.bundles
        for i in b.instructions
    )
    return v7x if has_result_buffer else v6e
