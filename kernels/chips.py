"""What a kernel must know of a TPU generation: one frozen record per chip.

Figures are per TensorCore, the unit one program runs on (JAX shows a v5p or v7x chip as two devices
or as one with halves: a program sees one core's VMEM either way). Sources: the `TpuInfo` records
JAX publishes with Pallas, and Google's system architecture pages (cloud.google.com/tpu/docs).
Loads no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        hbm_bytes: memory of one device as JAX shows it: a whole v4, v5e, v5p or v6e chip, one of
            the two cores of a tpu7x chip (192 GiB a chip).
        hbm_bytes_per_s, bf16_flops: peaks of one core.
        vmem_bytes, smem_bytes: on-chip memories of one core.
        num_mxus, mxu_side: matrix units and their width.
        rows_per_cycle: rows one matrix unit takes per cycle.
        has_int8, has_fp8: what the matrix unit multiplies natively.
    """

    name: str
    device_kind: str
    topology: str
    hbm_bytes: int
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
_GIB = 1 << 30


def _chips() -> Iterator[Chip]:
    yield Chip(
        name="v4",
        device_kind="TPU v4",
        topology="v4:2x2x1",
        hbm_bytes=32 * _GIB,
        hbm_bytes_per_s=0.615e12,
        bf16_flops=137.5e12,
        vmem_bytes=16 * _MIB,
        smem_bytes=_MIB,
        num_mxus=4,
        mxu_side=128,
        rows_per_cycle=1,
        has_int8=False,
        has_fp8=False,
    )
    yield Chip(
        name="v5e",
        device_kind="TPU v5 lite",
        topology="v5e:2x2",
        hbm_bytes=16 * _GIB,
        hbm_bytes_per_s=0.82e12,
        bf16_flops=197e12,
        vmem_bytes=128 * _MIB,
        smem_bytes=_MIB,
        num_mxus=4,
        mxu_side=128,
        rows_per_cycle=1,
        has_int8=True,
        has_fp8=False,
    )
    yield Chip(
        name="v5p",
        device_kind="TPU v5",
        topology="v5p:2x2x1",
        hbm_bytes=95 * _GIB,
        hbm_bytes_per_s=1.23e12,
        bf16_flops=229.5e12,
        vmem_bytes=64 * _MIB,
        smem_bytes=_MIB,
        num_mxus=4,
        mxu_side=128,
        rows_per_cycle=1,
        has_int8=True,
        has_fp8=False,
    )
    yield Chip(
        name="v6e",
        device_kind="TPU v6 lite",
        topology="v6e:2x2",
        hbm_bytes=32 * _GIB,
        hbm_bytes_per_s=1.64e12,
        bf16_flops=920e12,
        vmem_bytes=128 * _MIB,
        smem_bytes=_MIB,
        num_mxus=2,
        mxu_side=256,
        rows_per_cycle=2,
        has_int8=True,
        has_fp8=True,
    )
    yield Chip(
        name="tpu7x",
        device_kind="TPU7x",
        topology="tpu7x:2x2x1",
        hbm_bytes=96 * _GIB,
        hbm_bytes_per_s=3.70e12,
        bf16_flops=1155e12,
        vmem_bytes=64 * _MIB,
        smem_bytes=_MIB,
        num_mxus=2,
        mxu_side=256,
        rows_per_cycle=2,
        has_int8=False,
        has_fp8=True,
    )


CHIPS: dict[str, Chip] = {chip.name: chip for chip in _chips()}


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
