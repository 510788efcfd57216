"""The arithmetic of the chunk kernel: scores, weights, accumulation, and the last division.

Everything is transposed: a score matrix is `[kv_block, columns]`, an accumulator `[Hv, columns]`,
where a column is one query head of one token. On matrix units 256 wide this fills the contraction
of `V^T P^T` entirely and that of `K Q^T` half; the plain orientation fills half of both.
Maxima then run over vector registers and only at the end over sublanes, and rows of ones below
`V^T` make the denominators rows of the accumulator.

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
from kernels.attention.pallas.chunk_copies import HIGH, LOW, OWN_ROW, Memory
from kernels.attention.pallas.chunk_work import UNBOUNDED
from kernels.chips import LANES, SUBLANES

LOG2_E = math.log2(math.e)
# Stands for "not seen"; finite, so that a column that has seen nothing yet holds no NaN.
UNSEEN = -1e30
# Rows of a bf16 register: the least a matrix unit takes.
BF16_ROWS = 2 * SUBLANES


def query_factor(scale: float, soft_cap: float | None) -> float:
    """What queries are multiplied by before the kernel."""
    return scale * LOG2_E if soft_cap is None else scale / soft_cap


def mark_seen(mem: Memory, slot: Any) -> None:
    """Notes which rows of a block each token sees, as what is added to scores: 0 or `UNSEEN`."""
    width, rows = max(mem.blocks.q_tokens, LANES), mem.blocks.kv_block
    row = lax.broadcasted_iota(jnp.int32, (rows, width), 0)
    token = lax.broadcasted_iota(jnp.int32, (rows, width), 1) & (mem.blocks.q_tokens - 1)
    own = token + mem.ring[slot, OWN_ROW]
    visible = (row <= own) & (row >= mem.ring[slot, LOW]) & (row < mem.ring[slot, HIGH])
    if mem.scoring.has_window:
        visible &= row > own - jnp.where(mem.window > 0, mem.window, UNBOUNDED)
    mem.vmem["unseen"][...] = jnp.where(visible, 0.0, UNSEEN)


def clear_rows(mem: Memory, slot: Any) -> None:
    """Zeroes the rows that hold no position to be seen: neither bias nor weight stops a NaN."""
    low, high, tile = mem.ring[slot, LOW], mem.ring[slot, HIGH], mem.tile
    geometry, kv = mem.geometry, mem.vmem["kv"]
    shift = tile.bit_length() - 1

    def clear_tile(i: Any) -> None:
        at = pl.multiple_of(i * tile, tile)
        row = at + lax.broadcasted_iota(jnp.int32, (tile, geometry.key_width), 0)
        valid = (row >= low) & (row < high)
        for plane in range(geometry.num_planes):
            for head in range(geometry.num_kv_heads):
                rows = kv[slot, plane, head, pl.ds(at, tile), :].astype(jnp.float32)
                kept = jnp.where(valid, rows, 0.0).astype(kv.dtype)
                kv[slot, plane, head, pl.ds(at, tile), :] = kept

    pl.loop(0, (low + tile - 1) >> shift)(clear_tile)
    pl.loop(high >> shift, mem.blocks.kv_block // tile)(clear_tile)


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


def unseen(mem: Memory, tile: slice) -> jax.Array:
    """What hides the rows of a block from the columns of a tile; heads take turns in columns."""
    size, bias = tile.stop - tile.start, mem.vmem["unseen"]
    width = bias.shape[1]
    if size > width:
        return jnp.concatenate([bias[...]] * (size // width), axis=1)
    return bias[:, tile.start % width : tile.start % width + size]


def keep_scores(mem: Memory, nth: int, tile: slice, scores: jax.Array) -> None:
    """Leaves scores, and the largest of each column, for the next step."""
    mem.vmem["scores"][nth, :, tile] = scores
    top = jnp.max(jnp.max(_by_sublane(scores), axis=0), axis=0, keepdims=True)
    mem.vmem["block_top"][nth, :, tile] = jnp.broadcast_to(top, (SUBLANES, top.shape[1]))


def weigh(mem: Memory, group: Any, nth: int, tile: slice) -> tuple[jax.Array, jax.Array]:
    """Turns the scores left by the step before into weights; updates the maxima.

    Returns the weights and what older sums shrink by.
    """
    vmem, band = mem.vmem, group * mem.blocks.step_bands + nth
    old = vmem["top"][band, :, tile]
    top = jnp.maximum(old, vmem["block_top"][nth, :, tile])
    shrink = jnp.exp2(old - top)
    vmem["top"][band, :, tile] = top
    weights = jnp.exp2(_by_sublane(vmem["scores"][nth, :, tile]) - top[None])
    weights = weights.reshape(mem.blocks.kv_block, top.shape[1])
    return weights.astype(compute_dtype(mem.geometry)), shrink


def values_of(mem: Memory, group: Any, nth: int, slot: Any) -> jax.Array:
    """`[Hv + 16, kv_block]`: a block's values, transposed; the ones below sum up the weights."""
    plane, dtype = mem.geometry.num_planes - 1, compute_dtype(mem.geometry)
    values = mem.vmem["kv"][slot, plane, _kv_head(mem, group, nth)]
    values = values[:, : mem.geometry.value_width].astype(dtype).T
    ones = jnp.ones((BF16_ROWS, mem.blocks.kv_block), dtype)
    return jnp.concatenate([values, ones], axis=0)


def accumulate(
    mem: Memory, band: Any, tile: slice, values: jax.Array, weights: jax.Array, shrink: jax.Array
) -> None:
    acc = mem.vmem["acc"]
    added = _matmul(values, weights, (1, 0))[: acc.shape[1]]
    older = (_by_sublane(acc[band, :, tile]) * shrink[None]).reshape(added.shape)
    acc[band, :, tile] = older + added


def step(mem: Memory, before: tuple[Any, Any], now: tuple[Any, Any], parity: Any) -> None:
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
            keep_scores(mem, nth, tile, scores + unseen(mem, tile))
            if pending is not None:
                accumulate(mem, *pending)
            band = before[1] * mem.blocks.step_bands + nth
            pending = (band, tile, values, weights, shrink)
    assert pending is not None
    accumulate(mem, *pending)


def finish(mem: Memory, band: Any, parity: Any) -> None:
    """Divides one band's sums, lays them out as tokens, and empties the band for the next item."""
    vmem, blocks, width = mem.vmem, mem.blocks, mem.geometry.value_width
    acc, tokens = vmem["acc"], blocks.q_tokens
    # Nothing seen yet, or the sink alone, which weighs 1 against itself.
    seen_first = 0.0 if mem.sinks is None else 1.0
    for nth in range(blocks.band_heads):
        columns = slice(nth * tokens, (nth + 1) * tokens)
        shares = 1.0 / acc[band, width : width + SUBLANES, columns]
        out = _by_sublane(acc[band, :width, columns]) * shares[None]
        out = out.reshape(width, tokens).astype(vmem["out"].dtype)
        vmem["out"][parity, band * blocks.band_heads + nth, :, :] = out.T
        acc[band, :width, columns] = jnp.zeros((width, tokens), jnp.float32)
        acc[band, width:, columns] = jnp.full((SUBLANES, tokens), seen_first, jnp.float32)
    top = UNSEEN if mem.sinks is None else mem.sinks[band]
    vmem["top"][band] = jnp.broadcast_to(top, vmem["top"].shape[1:])
