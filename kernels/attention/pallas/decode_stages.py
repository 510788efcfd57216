"""The vector work on one item of the decode kernel: write, score, softmax, accumulate.

Owns the arithmetic and the masks. Each stage reads and writes VMEM only and has no branch, so that
stages of different items fill one another's latencies. Knows nothing of transfers or of which item
comes next.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels.attention.cache_layout import K_PLANE, V_PLANE
from kernels.attention.pallas.decode_blocks import WORD_BYTES, DecodeShape
from kernels.chips import LANES

LOG2_E = math.log2(math.e)  # scores are kept in base 2: the hardware's exponential is 2**x
# Finite, so that no row ever computes inf - inf; a started sequence lies above a masked score,
# a masked score above the state before a sequence.
MASKED = -1e30
BEFORE = -2e30
WORD_BITS = 8 * WORD_BYTES


class ItemView(NamedTuple):
    """The scalars of an item that vector stages need; positions count from the block's start.

    `lo <= position < hi` holds what the item's pages own of the sequence and may be seen;
    the sequence's new tokens start at `new` (which may lie before or after the block).
    """

    lo: Array
    hi: Array
    new: Array
    first: Array
    seq: Array


class Stage(NamedTuple):
    """VMEM between the stages of one item: scores, weights, and each row's maximum and sum."""

    scores: Array
    weights: Array
    top: Array
    total: Array


class Running(NamedTuple):
    """VMEM that holds the sequence being accumulated: softmax state and unscaled output."""

    top: Array
    total: Array
    acc: Array


def _row_owner(shape: DecodeShape, width: int) -> Array:
    """Which KV head of its tile each row belongs to."""
    row = lax.broadcasted_iota(jnp.int32, (shape.tile_rows, width), 0)
    return lax.div(row, jnp.int32(shape.rows_per_head))


def _lanes(column: Array, width: int) -> Array:
    """A lane-replicated `[rows, 128]` column as `[rows, width]`."""
    return jnp.concatenate([column] * (width // LANES), axis=1) if width > LANES else column


def write_tile(
    shape: DecodeShape, kv, rows_new, item: ItemView, start: Array, count: Array
) -> None:
    """Merges the new rows into the packed tile that begins at block position `start`.

    `count` is 0 where the item has no new token there: then nothing changes.
    """
    geometry, packing, rows = shape.geometry, shape.packing, shape.write_rows
    page = lax.div(start, jnp.int32(geometry.page_size))
    inside = pl.ds(pl.multiple_of(start & (geometry.page_size - 1), rows), rows)
    width = geometry.key_width
    word_row = lax.broadcasted_iota(jnp.int32, (rows // packing, width), 0)
    bits = WORD_BITS // packing
    element = jnp.int32(-1 if packing == 1 else (1 << bits) - 1)
    masks = []
    for j in range(shape.blocks.decode_queries):
        place = item.new + j - start
        here = count > 0
        if shape.blocks.decode_queries > 1:
            here &= (place >= 0) & (place < rows) & (item.new + j < item.hi)
            place = jnp.where(here, place, 0)
        lane_bits = jnp.left_shift(element, (place & (packing - 1)) * bits)
        lane_bits = jnp.where(here, lane_bits, 0)
        masks.append(jnp.where(word_row == lax.div(place, jnp.int32(packing)), lane_bits, 0))
    heads = geometry.num_kv_heads
    for plane in range(geometry.num_planes):
        for head in range(heads):
            tile = kv.at[page, plane, head, inside, :]
            words = pltpu.bitcast(tile[...], jnp.int32)
            for j, mask in enumerate(masks):
                source = (j * geometry.num_planes + plane) * heads + head
                words = (words & ~mask) | (_new_words(shape, rows_new, source) & mask)
            tile[...] = pltpu.bitcast(words, kv.dtype)


def _new_words(shape: DecodeShape, rows, source: int) -> Array:
    """One new row as 32-bit words that hold it once per cache row sharing the word."""
    if rows.dtype == jnp.int32:
        return rows[0, source : source + 1, :]
    packing, at = shape.packing, shape.num_rows + source
    first = at - at % packing
    words = pltpu.bitcast(rows[0, first : first + packing, :], jnp.int32)
    bits = WORD_BITS // packing
    part = lax.shift_right_logical(words, at % packing * bits)
    if packing > 1:
        part &= (1 << bits) - 1
    while bits < WORD_BITS:
        part |= part << bits
        bits *= 2
    return part


def score(shape: DecodeShape, q, kv, stage: Stage) -> None:
    """Scores of one item, before scale and mask: one dense tile per group of KV heads.

    Each head's keys meet the tile's rows with the other heads' rows set to zero, so that the sum
    over heads leaves every row with its own head's scores.
    """
    geometry, heads = shape.geometry, shape.blocks.heads_per_tile
    dtype, width = jnp.dtype(shape.compute_dtype), geometry.key_width
    owner = _row_owner(shape, width)
    for tile in range(shape.num_tiles):
        rows = slice(tile * shape.tile_rows, (tile + 1) * shape.tile_rows)
        queries = q[0, rows, :].astype(jnp.float32)
        total = None
        for head in range(heads):
            mine = queries if heads == 1 else jnp.where(owner == head, queries, 0.0)
            keys = _operand(shape, kv[:, K_PLANE, tile * heads + head].reshape(-1, width))
            part = _matmul(mine.astype(dtype), keys, transposed=True)
            total = part if total is None else total + part
        stage.scores[rows] = total


def softmax(shape: DecodeShape, item: ItemView, tree, window, stage: Stage) -> None:
    """Turns an item's scores into weights relative to its own maximum."""
    for tile in range(shape.num_tiles):
        rows = slice(tile * shape.tile_rows, (tile + 1) * shape.tile_rows)
        scores = _scaled(shape, stage.scores[rows])
        scores = jnp.where(_visible(shape, item, tree, window), scores, MASKED)
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        stage.weights[rows] = weights.astype(stage.weights.dtype)
        column = (shape.tile_rows, LANES)
        stage.top[rows] = jnp.broadcast_to(top, column)
        stage.total[rows] = jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), column)


def accumulate(
    shape: DecodeShape, item: ItemView, kv, stage: Stage, run: Running, sinks, out
) -> None:
    """Adds an item's weighted values to its sequence; the first item of one starts it afresh.

    `out` gets the sequence so far, divided by its denominator: right after the last item.
    """
    geometry, heads = shape.geometry, shape.blocks.heads_per_tile
    width = geometry.value_width
    plane = K_PLANE if geometry.latent else V_PLANE
    owned = _owned_words(shape, item)
    owner = _row_owner(shape, width)
    for tile in range(shape.num_tiles):
        rows = slice(tile * shape.tile_rows, (tile + 1) * shape.tile_rows)
        values = []
        for head in range(heads):
            value = kv[:, plane, tile * heads + head, :, :width].reshape(-1, width)
            words = pltpu.bitcast(value, jnp.int32) & owned
            values.append(_operand(shape, pltpu.bitcast(words, kv.dtype)))
        wide = _matmul(stage.weights[rows], jnp.concatenate(values, axis=1))
        part = wide[:, :width]
        for head in range(1, heads):
            part = jnp.where(owner == head, wide[:, head * width : (head + 1) * width], part)
        before = jnp.where(item.first, BEFORE, run.top[rows])
        top = jnp.maximum(before, stage.top[rows])
        keep, add = jnp.exp2(before - top), jnp.exp2(stage.top[rows] - top)
        # Selected, not multiplied by a zero: before the first item these hold garbage.
        total = jnp.where(item.first, 0.0, run.total[rows] * keep)
        acc = jnp.where(item.first, 0.0, run.acc[rows] * _lanes(keep, width))
        total += stage.total[rows] * add
        acc += part * _lanes(add, width)
        run.top[rows], run.total[rows], run.acc[rows] = top, total, acc
        if shape.scoring.has_sinks:
            total += jnp.exp2(sinks[rows] * LOG2_E - top)
        out[0, rows, :] = (acc * _lanes(1.0 / total, width)).astype(out.dtype)


def _operand(shape: DecodeShape, rows: Array) -> Array:
    """Cached rows as the matrix unit takes them beside queries and weights."""
    if shape.native_float8:
        return rows
    return rows.astype(jnp.dtype(shape.compute_dtype))


def _matmul(left: Array, right: Array, *, transposed: bool = False) -> Array:
    """float32 product; float32 operands are multiplied exactly, not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        left, right, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _scaled(shape: DecodeShape, scores: Array) -> Array:
    """Scale and soft cap, in base 2."""
    cap, scale = shape.scoring.soft_cap, shape.scoring.scale
    if cap is None:
        return scores * (scale * LOG2_E)
    return jnp.tanh(scores * (scale / cap)) * (cap * LOG2_E)


def _visible(shape: DecodeShape, item: ItemView, tree, window) -> Array:
    """Which positions of the block each row of a tile sees."""
    num_new = shape.blocks.decode_queries
    size = (shape.tile_rows, shape.blocks.block_tokens)
    position = lax.broadcasted_iota(jnp.int32, size, 1)
    seen = position < item.hi
    if num_new == 1:
        return (seen & (position >= item.lo)) if shape.scoring.has_window else seen
    row = lax.broadcasted_iota(jnp.int32, size, 0)
    query = lax.rem(lax.div(row, jnp.int32(shape.geometry.group)), jnp.int32(num_new))
    own = item.new + query
    seen &= position <= own
    if shape.scoring.has_window:
        seen &= (window <= 0) | (position > own - window)
    if shape.scoring.has_tree:
        bits = jnp.zeros(size, jnp.int32)
        for j in range(num_new):
            bits = jnp.where(query == j, tree[item.seq * num_new + j], bits)
        index = jnp.clip(position - item.new, 0, num_new - 1)
        seen &= (position < item.new) | ((jnp.right_shift(bits, index) & 1) == 1)
    return seen


def _owned_words(shape: DecodeShape, item: ItemView) -> Array:
    """Masks of 32-bit words that keep the values of positions `lo .. hi` and clear the rest.

    Positions nobody owns may hold NaN, which a zero weight would not remove.
    """
    packing = shape.packing
    size = (shape.blocks.block_tokens // packing, shape.geometry.value_width)
    first = lax.broadcasted_iota(jnp.int32, size, 0) * packing
    words = jnp.zeros(size, jnp.int32)
    bits = WORD_BITS // packing
    for part in range(packing):
        keep = first + part < item.hi
        if shape.scoring.has_window:
            keep &= first + part >= item.lo
        element = (((1 << bits) - 1) << (part * bits)) if packing > 1 else (1 << 32) - 1
        signed = element - (1 << 32) if element >> 31 else element
        words |= jnp.where(keep, jnp.int32(signed), 0)
    return words
