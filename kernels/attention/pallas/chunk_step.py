"""The arithmetic of the chunk kernel: scores, weights, accumulation, and the last division.

Everything is transposed: a score matrix is `[kv_block, columns]`, an accumulator `[Hv, columns]`,
where a column is one query head of one token. On matrix units 256 wide this fills the contraction
of `V^T P^T` entirely and that of `K Q^T` half; the plain orientation fills half of both.
Row maxima then run over vector registers and only at the end over sublanes.

Scores are in powers of two (queries come in multiplied by log2(e)), since that is what the
hardware exponentiates.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention.pallas.chunk_blocks import TILE_COLUMNS, compute_dtype
from kernels.attention.pallas.chunk_copies import Memory
from kernels.attention.pallas.chunk_work import UNBOUNDED, Item, KvBlock
from kernels.chips import LANES, SUBLANES

LOG2_E = math.log2(math.e)
# Stands for "not seen"; finite, so that a column that has seen nothing yet holds no NaN.
UNSEEN = -1e30
# A row number no query reaches.
NOWHERE = 1 << 30


def query_factor(scale: float, soft_cap: float | None) -> float:
    """What queries are multiplied by before the kernel."""
    return scale * LOG2_E if soft_cap is None else scale / soft_cap


def mark_places(mem: Memory, block: KvBlock) -> None:
    """Notes for each row of a block its number, or that it isn't a position to be seen."""
    row = lax.broadcasted_iota(jnp.int32, (mem.blocks.kv_block, LANES), 0)
    valid = (row >= block.low) & (row < block.high)
    mem.vmem["places"][...] = jnp.where(valid, row, NOWHERE)


def clear_values(mem: Memory, block: KvBlock, slot: Any) -> None:
    """Zeroes the values of rows that hold no position: a weight of 0 doesn't stop a NaN."""
    rows, kv = mem.blocks.kv_block, mem.vmem["kv"]
    row = lax.broadcasted_iota(jnp.int32, (rows, mem.geometry.key_width), 0)
    valid = (row >= block.low) & (row < block.high)

    @pl.loop(0, mem.geometry.num_kv_heads)
    def _(head: Any) -> None:
        values = kv[slot, mem.geometry.num_planes - 1, head].astype(jnp.float32)
        kept = jnp.where(valid, values, 0.0).astype(kv.dtype)
        kv[slot, mem.geometry.num_planes - 1, head] = kept


def _kv_head(mem: Memory, group: Any, nth: int) -> Any:
    per_head = mem.geometry.group // mem.blocks.band_heads
    band = group * mem.blocks.step_bands + nth
    return band if per_head == 1 else lax.div(band, per_head)


def _tiles(mem: Memory) -> list[slice]:
    columns = mem.blocks.columns
    edges = range(0, columns, TILE_COLUMNS)
    return [slice(at, min(at + TILE_COLUMNS, columns)) for at in edges]


def _matmul(a: jax.Array, b: jax.Array, contracting: tuple[int, int]) -> jax.Array:
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contracting[0],), (contracting[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else None,
    )


def _by_sublane(x: jax.Array) -> jax.Array:
    """`[R, C]` as `[R / 8, 8, C]`, so that reductions and factors go register by register."""
    return x.reshape(x.shape[0] // SUBLANES, SUBLANES, x.shape[1])


def score(mem: Memory, group: Any, nth: int, tile: slice, slot: Any, parity: Any) -> jax.Array:
    """`[kv_block, tile]` scores of one band's queries with a block's keys."""
    blocks, dtype = mem.blocks, compute_dtype(mem.geometry)
    band = group * blocks.step_bands + nth
    heads = pl.ds(band * blocks.band_heads, blocks.band_heads)
    q = mem.vmem["q"][parity, heads, :, :].reshape(blocks.columns, mem.geometry.key_width)
    keys = mem.vmem["kv"][slot, 0, _kv_head(mem, group, nth)].astype(dtype)
    scores = _matmul(keys, q[tile].astype(dtype), (1, 1))
    if mem.scoring.soft_cap is not None:
        scores = jnp.tanh(scores) * (mem.scoring.soft_cap * LOG2_E)
    return scores


def seen(mem: Memory, item: Item, block: KvBlock, tile: slice) -> jax.Array:
    """Which rows of a block each column sees: nothing later than its token, all in the window."""
    size = tile.stop - tile.start
    column = tile.start + lax.broadcasted_iota(jnp.int32, (SUBLANES, size), 1)
    token = item.q_start + (column & (mem.blocks.q_tokens - 1))
    own_row = item.position(token) - block.position
    places = mem.vmem["places"][...]
    places = _by_sublane(jnp.concatenate([places] * (size // LANES), axis=1))
    visible = places <= own_row[None]
    if mem.scoring.has_window:
        window = jnp.where(mem.window > 0, mem.window, UNBOUNDED)
        visible &= places > (own_row - window)[None]
    return visible.reshape(mem.blocks.kv_block, size)


def keep_scores(mem: Memory, nth: int, tile: slice, scores: jax.Array) -> None:
    """Leaves scores, and the largest of each column, for the next step."""
    mem.vmem["scores"][nth, :, tile] = scores
    top = jnp.max(jnp.max(_by_sublane(scores), axis=0), axis=0, keepdims=True)
    mem.vmem["block_top"][nth, :, tile] = jnp.broadcast_to(top, (SUBLANES, top.shape[1]))


def weigh(mem: Memory, group: Any, nth: int, tile: slice) -> tuple[jax.Array, jax.Array]:
    """Turns the scores left by the step before into weights; updates maxima and denominators.

    Returns the weights and what older sums shrink by.
    """
    vmem, band = mem.vmem, group * mem.blocks.step_bands + nth
    old = vmem["top"][band, :, tile]
    top = jnp.maximum(old, vmem["block_top"][nth, :, tile])
    shrink = jnp.exp2(old - top)
    vmem["top"][band, :, tile] = top
    weights = jnp.exp2(_by_sublane(vmem["scores"][nth, :, tile]) - top[None])
    denominator = vmem["denominator"]
    denominator[band, :, tile] = denominator[band, :, tile] * shrink + jnp.sum(weights, axis=0)
    weights = weights.reshape(mem.blocks.kv_block, top.shape[1])
    return weights.astype(compute_dtype(mem.geometry)), shrink


def values_of(mem: Memory, group: Any, nth: int, slot: Any) -> jax.Array:
    """`[Hv, kv_block]`: a block's values, transposed."""
    plane = mem.geometry.num_planes - 1
    values = mem.vmem["kv"][slot, plane, _kv_head(mem, group, nth)]
    return values[:, : mem.geometry.value_width].astype(compute_dtype(mem.geometry)).T


def accumulate(
    mem: Memory, band: Any, tile: slice, values: jax.Array, weights: jax.Array, shrink: jax.Array
) -> None:
    acc = mem.vmem["acc"]
    added = _matmul(values, weights, (1, 0))
    older = (_by_sublane(acc[band, :, tile]) * shrink[None]).reshape(added.shape)
    acc[band, :, tile] = older + added


def step(
    mem: Memory,
    before: tuple[Any, Any],
    now: tuple[Any, Any],
    parity: Any,
    item: Item,
    block: KvBlock,
    *,
    masked: bool,
) -> None:
    """Scores `now` = (slot, group) and, in the same stretch of code, finishes `before`.

    Per tile: the old scores are read, then overwritten by new ones; the product with the values
    comes one tile later. So every unit has work that waits for nothing.
    """
    pending = None
    for nth in range(mem.blocks.step_bands):
        values = values_of(mem, before[1], nth, before[0])
        for tile in _tiles(mem):
            weights, shrink = weigh(mem, before[1], nth, tile)
            scores = score(mem, now[1], nth, tile, now[0], parity)
            if masked:
                scores = jnp.where(seen(mem, item, block, tile), scores, UNSEEN)
            keep_scores(mem, nth, tile, scores)
            if pending is not None:
                accumulate(mem, *pending)
            band = before[1] * mem.blocks.step_bands + nth
            pending = (band, tile, values, weights, shrink)
    assert pending is not None
    accumulate(mem, *pending)


def reset(mem: Memory, band: Any) -> None:
    """An empty band: nothing seen, or the sink alone."""
    vmem, shape = mem.vmem, mem.vmem["top"].shape[1:]
    vmem["acc"][band] = jnp.zeros(vmem["acc"].shape[1:], jnp.float32)
    if mem.sinks is None:
        vmem["top"][band] = jnp.full(shape, UNSEEN, jnp.float32)
        vmem["denominator"][band] = jnp.zeros(shape, jnp.float32)
    else:
        vmem["top"][band] = jnp.broadcast_to(mem.sinks[band], shape)
        # Denominators are kept per sublane and summed at the end: the sink counts once.
        first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
        vmem["denominator"][band] = jnp.where(first, 1.0, 0.0)


def finish(mem: Memory, band: Any, parity: Any) -> None:
    """Divides one band's sums and lays them out as tokens."""
    vmem, blocks = mem.vmem, mem.blocks
    denominator = jnp.sum(vmem["denominator"][band], axis=0, keepdims=True)
    out = vmem["acc"][band] * (1.0 / denominator)
    out = out.astype(vmem["out"].dtype).T
    heads = pl.ds(band * blocks.band_heads, blocks.band_heads)
    shape = (blocks.band_heads, blocks.q_tokens, mem.geometry.value_width)
    vmem["out"][parity, heads, :, :] = out.reshape(shape)
