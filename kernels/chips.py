"""What a kernel must know of a TPU generation: one frozen record per chip.

Figures are per TensorCore, the unit one program runs on (JAX shows a v5p or v7x chip as two devices
or as one with halves: a program sees one core's VMEM either way). Sources: the `TpuInfo` records
JAX publishes with Pallas, and Google's system architecture pages (cloud.google.com/tpu/docs).
Loads no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128  # columns of a vector register
SUBLANES = 8  # rows of a vector register of 32-bit words


@dataclass(frozen=True, slots=True)
class Chip:
    """One TensorCore of a generation.

    Attributes:
        name: as people type it ("v6e").
        device_kind: as JAX's devices say it ("TPU v6 lite").
        topology: a small topology whose compiler targets this chip.
        hbm_bytes_per_s, bf16_flops: peaks of one core.
        vmem_bytes, smem_bytes: on-chip memories of one core.
        num_mxus, mxu_side: matrix units and their width.
        rows_per_cycle: rows one matrix unit takes per cycle.
        has_int8, has_fp8: what the matrix unit multiplies natively.
    """

    name: str
    device_kind: str
    topology: str
    hbm_bytes_per_s: float
    bf16_flops: float
    vmem_bytes: int
    smem_bytes: int
    num_mxus: int
    mxu_side: int
    rows_per_cycle: int
    has_int8: bool
    has_fp8: bool

    @property
    def flops_per_cycle(self) -> int:
        """bf16 FLOP per cycle of all matrix units."""
        return self.num_mxus * self.mxu_side**2 * 2 * self.rows_per_cycle

    @property
    def clock_hz(self) -> float:
        return self.bf16_flops / self.flops_per_cycle

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_s / self.clock_hz


_MIB = 1 << 20

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", "TPU v4", "v4:2x2x1", 0.615e12, 137.5e12, 16 * _MIB, _MIB, 4, 128, 1, False, False
        ),
        Chip(
            "v5e",
            "TPU v5 lite",
            "v5e:2x2",
            0.82e12,
            197e12,
            128 * _MIB,
            _MIB,
            4,
            128,
            1,
            True,
            False,
        ),
        Chip(
            "v5p", "TPU v5", "v5p:2x2x1", 1.23e12, 229.5e12, 64 * _MIB, _MIB, 4, 128, 1, True, False
        ),
        Chip(
            "v6e",
            "TPU v6 lite",
            "v6e:2x2",
            1.64e12,
            920e12,
            128 * _MIB,
            _MIB,
            2,
            256,
            2,
            True,
            True,
        ),
        Chip(
            "tpu7x",
            "TPU7x",
            "tpu7x:2x2x1",
            3.70e12,
            1155e12,
            64 * _MIB,
            _MIB,
            2,
            256,
            2,
            False,
            True,
        ),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of that name; raises `ValueError` that lists the known ones."""
    if name not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}")
    return CHIPS[name]


def chip_of(device_kind: str) -> Chip:
    """The chip whose devices call themselves so; raises `ValueError` that lists the known kinds."""
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    kinds = ", ".join(chip.device_kind for chip in CHIPS.values())
    raise ValueError(f"device kind must be one of {kinds}, got {device_kind!r}")
