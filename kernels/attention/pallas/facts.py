"""What the kernels' loops get done, in the words of `kernels.analysis`.

Owns the bridge from blocks to figures: which loop is steady, how much a pass of it covers, and how
many blocks of either kind a step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.analysis.prediction import StepFacts, WorkFacts
from kernels.attention.geometry import Geometry
from kernels.attention.pallas.chunk_blocks import ChunkBlocks, num_bands, row_tile
from kernels.attention.pallas.chunk_work import block_at, chunk_work, item_at
from kernels.attention.pallas.decode_blocks import DecodeBlocks
from kernels.attention.pallas.tables import step_tables

# A mixed step's chunk fills the step up behind this many decodes, so it begins on no tile's border.
DECODES_BEFORE = 17


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Lanes of a head that mean something, without padding and neighbours; for useful FLOP."""

    key: int
    value: int


def decode_facts(geometry: Geometry, dims: HeadDims, blocks: DecodeBlocks) -> WorkFacts:
    """A pass of the loop works on one item per slot and lane; nothing in it is a branch."""
    blocks_per_pass = blocks.num_slots * blocks.items_per_step
    positions = blocks.block_tokens * blocks_per_pass
    return WorkFacts(
        block_tokens=blocks.block_tokens,
        blocks_per_pass=blocks_per_pass,
        num_kv_heads=geometry.num_kv_heads,
        kv_token_head_bytes=_row_bytes(geometry),
        useful_flops=positions * _flops_per_pair(geometry, dims),
    )


def chunk_facts(geometry: Geometry, dims: HeadDims, blocks: ChunkBlocks) -> WorkFacts:
    """A pass covers one query block and one KV block, in a loop over groups if there are many."""
    groups = num_bands(geometry, blocks) // blocks.step_bands
    pairs = blocks.q_tokens * blocks.kv_block
    return WorkFacts(
        block_tokens=blocks.kv_block,
        blocks_per_pass=1,
        num_kv_heads=geometry.num_kv_heads,
        kv_token_head_bytes=_row_bytes(geometry),
        useful_flops=pairs * _flops_per_pair(geometry, dims),
        inner_passes=(groups,) if groups > 1 else (),
    )


def chunk_steps(
    geometry: Geometry,
    dims: HeadDims,
    blocks: ChunkBlocks,
    num_tokens: int,
    contexts: Sequence[int],
) -> dict[int, StepFacts]:
    """A step of `num_tokens`: a few decodes, and one chunk behind so many positions."""
    chunk = num_tokens - DECODES_BEFORE
    count = jax.jit(partial(_count_blocks, geometry, blocks, chunk, max(contexts)))
    found: dict[int, StepFacts] = {}
    for context in contexts:
        items, all_blocks, masked = map(int, count(jnp.int32(context)))
        pairs = chunk * context + chunk * (chunk + 1) // 2
        read = (all_blocks * blocks.kv_block + chunk) * geometry.num_kv_heads
        rows_bytes = chunk * geometry.num_q_heads * (geometry.key_width + geometry.value_width)
        found[context] = StepFacts(
            items=items,
            blocks=all_blocks - masked,
            masked_blocks=masked,
            useful_flops=pairs * _flops_per_pair(geometry, dims),
            hbm_bytes=read * _row_bytes(geometry)
            + rows_bytes * jnp.dtype(geometry.q_dtype).itemsize,
        )
    return found


def _count_blocks(
    geometry: Geometry,
    blocks: ChunkBlocks,
    chunk: int,
    most_context: int,
    context: Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Items, KV blocks, and those of them that need a mask."""
    rows, length = DECODES_BEFORE + 1, context + chunk
    width = -(-(most_context + chunk) // geometry.page_size)
    tables = step_tables(
        jnp.zeros((rows, width), jnp.int32),
        jnp.ones(rows, jnp.int32).at[-1].set(length),
        jnp.arange(rows + 1, dtype=jnp.int32).at[-1].add(chunk - 1),
        jnp.int32(rows),
        decode_queries=1,
    )
    work = chunk_work(tables, num_tokens=DECODES_BEFORE + chunk, geometry=geometry, blocks=blocks)
    index = jnp.arange(work.item_seqs.shape[0])[:, None]
    cut = {"tile": row_tile(geometry), "kv_block": blocks.kv_block}
    window = jnp.int32(0)
    item = item_at(index, work, window, q_tokens=blocks.q_tokens, **cut)
    most = (most_context + chunk) // blocks.kv_block + 4
    nth = jnp.arange(most)[None, :]
    is_real = (nth < item.num_blocks) & (index < work.num_items)
    masked = block_at(item, nth, window, **cut).masked & is_real
    return work.num_items, jnp.sum(is_real), jnp.sum(masked)


def _flops_per_pair(geometry: Geometry, dims: HeadDims) -> int:
    """FLOP of all query heads for one query and one position."""
    return 2 * geometry.num_q_heads * (dims.key + dims.value)


def _row_bytes(geometry: Geometry) -> int:
    """HBM bytes of one position of one KV head, all planes."""
    itemsize = jnp.dtype(geometry.kv_dtype).itemsize
    return geometry.num_planes * geometry.key_width * itemsize
