"""Block sizes of the chunk kernel: what they mean, what they cost, which ones fit a chip.

Owns `ChunkBlocks` and the estimate of on-chip memory. Knows the shapes of the kernel's buffers and
nothing of how they are filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.attention.geometry import Geometry, Scoring
from kernels.chips import LANES, SUBLANES, Chip

# A page id window is one row of lanes, the least a transfer to scalar memory moves.
IDS_PER_WINDOW = LANES
# Columns of one matmul: the side of the widest matrix unit; narrower ones take it in two passes.
TILE_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Tile sizes of one compiled chunk kernel; each but the last two is a power of two.

    Attributes:
        q_tokens: tokens of a query block.
        kv_block: positions of a KV block.
        kv_slots: KV blocks in VMEM, one computed on, the others on their way.
        band_heads: query heads (of one KV head) that lie side by side as columns of one score
            matrix: a band has `band_heads * q_tokens` columns.
        step_bands: bands computed in one straight-line stretch of code.
    """

    q_tokens: int
    kv_block: int
    kv_slots: int
    band_heads: int
    step_bands: int

    @property
    def columns(self) -> int:
        """Columns of a band."""
        return self.band_heads * self.q_tokens


def itemsize(dtype: str) -> int:
    """Bytes of one element; NumPy alone does not know the 8-bit float."""
    return (
        1 if dtype.startswith("float8") else 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    )


def row_tile(geometry: Geometry) -> int:
    """Rows of the tile in which HBM keeps keys: 32-bit sublanes hold 4 // itemsize rows each."""
    return max(2 * SUBLANES, SUBLANES * 4 // itemsize(geometry.kv_dtype))


def num_bands(geometry: Geometry, blocks: ChunkBlocks) -> int:
    return geometry.num_q_heads // blocks.band_heads


def compute_dtype(geometry: Geometry) -> str:
    """What the matrix unit multiplies: bf16 unless queries or keys need more."""
    return "float32" if "float32" in (geometry.q_dtype, geometry.kv_dtype) else "bfloat16"


def vmem_bytes(geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks) -> int:
    """Bytes of all VMEM buffers, as the compiler pads them."""
    sizes = {
        name: int(np.prod(_padded(shape, itemsize(dtype)))) * itemsize(dtype)
        for name, (shape, dtype) in vmem_buffers(geometry, blocks).items()
    }
    sinks = num_bands(geometry, blocks) * SUBLANES * blocks.columns * 4 if scoring.has_sinks else 0
    return sum(sizes.values()) + sinks


def vmem_buffers(geometry: Geometry, blocks: ChunkBlocks) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every VMEM buffer of the kernel, by name."""
    planes, heads = geometry.num_planes, geometry.num_kv_heads
    tile, bands, columns = row_tile(geometry), num_bands(geometry, blocks), blocks.columns
    key, value = geometry.key_width, geometry.value_width
    kv, q = geometry.kv_dtype, geometry.q_dtype
    step = blocks.step_bands
    return {
        "kv": ((blocks.kv_slots, planes, heads, blocks.kv_block, key), kv),
        "q": ((2, geometry.num_q_heads, blocks.q_tokens, key), q),
        "out": ((2, geometry.num_q_heads, blocks.q_tokens, value), q),
        "scores": ((step, blocks.kv_block, columns), "float32"),
        "block_top": ((step, SUBLANES, columns), "float32"),
        "top": ((bands, SUBLANES, columns), "float32"),
        "acc": ((bands, value + SUBLANES, columns), "float32"),
        "unseen": ((blocks.kv_block, max(blocks.q_tokens, LANES)), "float32"),
        "fresh": ((planes, heads, blocks.q_tokens + tile, key), kv),
        "shifted": ((planes, heads, blocks.q_tokens + tile, key), kv),
        "edges": ((2, planes, heads, tile, key), kv),
        "held": ((planes, heads, tile, key), kv),
    }


def _padded(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    rows = SUBLANES * 4 // size
    return (*shape[:-2], -(-shape[-2] // rows) * rows, -(-shape[-1] // LANES) * LANES)


def smem_bytes(num_items: int, num_rows: int) -> int:
    """Bytes of scalar memory: two words per item, five per row, three windows of page ids."""
    return 4 * (2 * num_items + 5 * num_rows + 3 * IDS_PER_WINDOW + 256)


def check_blocks(geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks, chip: Chip) -> None:
    """Raises `ValueError` naming what doesn't fit, and a choice that does."""
    wrong = _misfit(geometry, scoring, blocks, chip)
    if wrong:
        fits = default_blocks(geometry, scoring, chip)
        raise ValueError(f"chunk kernel blocks {blocks}: {wrong}; these fit {chip.name}: {fits}")


def _misfit(geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks, chip: Chip) -> str:
    tile = row_tile(geometry)
    for name in ("q_tokens", "kv_block"):
        size = getattr(blocks, name)
        if size & (size - 1) or size < tile:
            return f"{name} must be a power of two of at least {tile}, got {size}"
    page = geometry.page_size
    if page & (page - 1) or page < tile:
        return f"page_size must be a power of two of at least {tile}, got {page}"
    if blocks.kv_block > page * IDS_PER_WINDOW:
        return f"kv_block must be at most {IDS_PER_WINDOW} pages, got {blocks.kv_block}"
    if geometry.group % blocks.band_heads:
        return f"band_heads ({blocks.band_heads}) must divide N/K = {geometry.group}"
    if blocks.columns % LANES:
        return f"band_heads * q_tokens must be a multiple of {LANES}, got {blocks.columns}"
    if num_bands(geometry, blocks) % blocks.step_bands:
        return f"step_bands must divide {num_bands(geometry, blocks)}, got {blocks.step_bands}"
    if blocks.kv_slots < 2:
        return f"kv_slots must be at least 2, got {blocks.kv_slots}"
    needed = vmem_bytes(geometry, scoring, blocks)
    if needed > usable_vmem(chip):
        return f"they need {needed} bytes of VMEM, {needed - usable_vmem(chip)} too many"
    return ""


# Spills of groups that are no power of two, and of heads of 256, take so much of small buffers too.
SPILL_BYTES = 3 << 20


def usable_vmem(chip: Chip) -> int:
    """What the buffers may take: the compiler keeps a sixth for spills and its own scratch."""
    return min(chip.vmem_bytes * 5 // 6, chip.vmem_bytes - SPILL_BYTES)


def vmem_limit(geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks) -> int:
    """What the compiler is told it may take; within the chip if `usable_vmem` holds."""
    needed = vmem_bytes(geometry, scoring, blocks)
    return needed + max(needed // 5, SPILL_BYTES)  # latent rows of 128 heads spill most


def default_blocks(geometry: Geometry, scoring: Scoring, chip: Chip) -> ChunkBlocks:
    """The first of `candidate_blocks`: they are ordered by expected speed."""
    return candidate_blocks(geometry, scoring, chip)[0]


def candidate_blocks(geometry: Geometry, scoring: Scoring, chip: Chip) -> list[ChunkBlocks]:
    """Block choices that fit the chip, the one expected to be fastest first.

    Steps of more than `STEP_SCORES` elements, which take long to compile, and query blocks of more
    rows than keep a KV byte busy are not among them.
    """
    most = STEP_SCORES.get(chip.name, STEP_SCORES["default"])
    fitting = [
        blocks
        for q_tokens in (256, 128, 64, 32, 16)
        for kv_block in (256, 512, 1024, 128, 64, 32)
        if (blocks := _most_slots(geometry, scoring, chip, (q_tokens, kv_block), most)) is not None
    ]
    if not fitting:
        raise ValueError(f"no blocks of the chunk kernel fit {chip.name} for {geometry}")
    small = [b for b in fitting if b.q_tokens * geometry.num_q_heads <= BLOCK_ROWS]
    return sorted(small or fitting, key=lambda b: _expected_share(b, chip), reverse=True)


def _most_slots(
    geometry: Geometry, scoring: Scoring, chip: Chip, sizes: tuple[int, int], most: int
) -> ChunkBlocks | None:
    """Blocks of these query tokens and KV positions, with as many KV slots as are of use."""
    band_heads = _widest_band(geometry.group, sizes[0])
    per_band = band_heads * sizes[0] * sizes[1]
    bands = geometry.num_q_heads // band_heads
    step = max((s for s in _divisors(bands) if s * per_band <= most), default=1)
    choices = (ChunkBlocks(*sizes, slots, band_heads, step) for slots in (4, 3, 2))
    return next((b for b in choices if not _misfit(geometry, scoring, b, chip)), None)


def _expected_share(blocks: ChunkBlocks, chip: Chip) -> float:
    """Share of the steady rate that a chunk of 1,024 tokens behind as many positions gets.

    A step's ramp lowers it, and so do the pairs computed beyond the causal diagonal and before the
    chunk's first token, half a KV block and half a query block on average; and KV blocks that
    don't fill the matrix unit's depth.
    """
    scores = blocks.step_bands * blocks.columns * blocks.kv_block
    seen = 1024 + 512
    causal = seen / (seen + (blocks.kv_block + blocks.q_tokens) / 2)
    return scores / (scores + RAMP_SCORES) * causal * min(1.0, blocks.kv_block / chip.mxu_side)


# Score elements of a step. The matrix units need some 260 cycles at a step's ends (weights in, last
# results out): 32 tiles of 256 x 256 hide them. Narrower units compute longer on half of that.
STEP_SCORES = {"default": 1 << 20, "v6e": 1 << 21, "tpu7x": 1 << 21}
# Elements that take as long as those 260 cycles: two and a half tiles.
RAMP_SCORES = 160 << 10
# Columns of a band beyond which nothing is gained.
BAND_COLUMNS = 1024
# Query rows (heads x tokens) of a block: 256 tokens of 32 heads of 128 do 1,024 FLOP per KV byte,
# more than any chip's ratio of FLOP to HBM bytes.
BLOCK_ROWS = 8192


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _widest_band(group: int, q_tokens: int) -> int:
    fitting = [d for d in _divisors(group) if d * q_tokens <= max(BAND_COLUMNS, q_tokens)]
    whole = [d for d in fitting if d * q_tokens % LANES == 0]
    return max(whole or fitting)
