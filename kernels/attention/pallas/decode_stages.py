"""The vector work on one item of the decode kernel: write, score, softmax, accumulate.

Owns the arithmetic and the masks. Each stage reads and writes VMEM only and has no branch, so that
stages of different items fill one another's latencies. Knows nothing of transfers or of which item
comes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels.attention.cache_layout import K_PLANE, V_PLANE
from kernels.attention.pallas.decode_blocks import WORD_BYTES, DecodeShape
from kernels.chips import LANES, SUBLANES

LOG2_E = math.log2(math.e)  # scores are kept in base 2: the hardware's exponential is 2**x
# Finite, so that no row ever computes inf - inf; a started sequence lies above a masked score,
# a masked score above the state before a sequence.
MASKED = -1e30
BEFORE = -2e30
WORD_BITS = 8 * WORD_BYTES


class ItemView(NamedTuple):
    """What the vector stages need to know of an item; positions count from the block's start.

    Positions `-behind <= position < hi` hold what the item's pages own of the sequence and may be
    seen; `behind` is 0 or less in a sequence's first item. The sequence's new tokens start at
    `new` (which may lie before or after the block). These are `[1, 128]` rows with the value in
    every lane: to a vector stage a scalar would be a register that it holds for long, and there
    are few of them.
    """

    hi: Array
    new: Array
    behind: Array
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


def _spread(mark: Array, size: tuple[int, int]) -> Array:
    """A mark as an array of `size`."""
    return _lanes(jnp.broadcast_to(mark[:, : size[1]], (size[0], min(size[1], LANES))), size[1])


def write_tile(shape: DecodeShape, kv, rows_new, item: ItemView, start: Array) -> None:
    """Merges the new rows into the packed tile that begins at block position `start`.

    Where the item has no new token there nothing changes.
    """
    geometry, packing, rows = shape.geometry, shape.packing, shape.write_rows
    page = start >> shape.page_bits
    inside = rows_inside(shape, start)
    size = (rows // packing, geometry.key_width)
    hi, new = _spread(item.hi, size), _spread(item.new, size)
    first = start + lax.broadcasted_iota(jnp.int32, size, 0) * packing
    masks = []
    for j in range(shape.blocks.decode_queries):
        here = jnp.where(new + j < hi, new + j, -1)
        masks.append(_words_of(shape, lambda part, here=here: first + part == here, size))
    heads = geometry.num_kv_heads
    for plane in range(geometry.num_planes):
        for head in range(heads):
            tile = kv.at[page, plane, head, inside]
            words = pltpu.bitcast(tile[...].reshape(rows, -1), jnp.int32)
            for j, mask in enumerate(masks):
                source = (j * geometry.num_planes + plane) * heads + head
                words = (words & ~mask) | (_new_words(shape, rows_new, source) & mask)
            tile[...] = pltpu.bitcast(words, kv.dtype).reshape(tile.shape)


def rows_inside(shape: DecodeShape, start: Array):
    """The tile to be written at block position `start`, within its page."""
    rows = shape.write_rows >> shape.group_bits
    first = (start & (shape.geometry.page_size - 1)) >> shape.group_bits
    return pl.ds(pl.multiple_of(first, rows), rows)


def _rows(ref, start: int, count: int) -> Array:
    """Rows of an array that may be in groups (`DecodeShape.grouped`): whole ones or part of one."""
    if len(ref.shape) == 2:
        return ref[start : start + count, :]
    group, within = divmod(start, SUBLANES)
    if count < SUBLANES:
        return ref[group, within : within + count, :]
    return ref[group : group + count // SUBLANES].reshape(count, ref.shape[-1])


def _new_words(shape: DecodeShape, rows, source: int) -> Array:
    """One new row as 32-bit words that hold it once per cache row sharing the word."""
    if rows.dtype == jnp.int32:
        return _rows(rows, source, 1)
    packing, at = shape.packing, shape.num_rows + source
    words = pltpu.bitcast(_rows(rows, at - at % packing, packing), jnp.int32)
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
        queries = _rows(q, tile * shape.tile_rows, shape.tile_rows).astype(jnp.float32)
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
    first = _spread(item.behind, (shape.tile_rows, LANES)) <= 0
    for tile in range(shape.num_tiles):
        rows = slice(tile * shape.tile_rows, (tile + 1) * shape.tile_rows)
        values = []
        for head in range(heads):
            value = kv[:, plane, tile * heads + head, ..., :width].reshape(-1, width)
            words = pltpu.bitcast(value, jnp.int32) & owned
            values.append(_operand(shape, pltpu.bitcast(words, kv.dtype)))
        wide = _matmul(stage.weights[rows], jnp.concatenate(values, axis=1))
        part = wide[:, :width]
        for head in range(1, heads):
            part = jnp.where(owner == head, wide[:, head * width : (head + 1) * width], part)
        before = jnp.where(first, BEFORE, run.top[rows])
        top = jnp.maximum(before, stage.top[rows])
        keep, add = jnp.exp2(before - top), jnp.exp2(stage.top[rows] - top)
        # Selected, not multiplied by a zero: before the first item these hold garbage.
        total = jnp.where(first, 0.0, run.total[rows] * keep)
        acc = jnp.where(_lanes(first, width), 0.0, run.acc[rows] * _lanes(keep, width))
        total += stage.total[rows] * add
        acc += part * _lanes(add, width)
        run.top[rows], run.total[rows], run.acc[rows] = top, total, acc
        if shape.scoring.has_sinks:
            total += jnp.exp2(sinks[rows] * LOG2_E - top)
        done = (acc * _lanes(1.0 / total, width)).astype(out.dtype)
        if len(out.shape) == 2:
            out[rows, :] = done
        else:
            first_group, groups = tile * shape.tile_rows // SUBLANES, shape.tile_rows // SUBLANES
            out[first_group : first_group + groups] = done.reshape(groups, SUBLANES, width)


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
    hi, new, lo = _spread(item.hi, size), _spread(item.new, size), -_spread(item.behind, size)
    seen = position < hi
    if num_new == 1:
        return (seen & (position >= lo)) if shape.scoring.has_window else seen
    row = lax.broadcasted_iota(jnp.int32, size, 0)
    query = lax.rem(lax.div(row, jnp.int32(shape.geometry.group)), jnp.int32(num_new))
    own = new + query
    seen &= position <= own
    if shape.scoring.has_window:
        seen &= (window <= 0) | (position > own - window)
    if shape.scoring.has_tree:
        bits = jnp.zeros(size, jnp.int32)
        for j in range(num_new):
            bits = jnp.where(query == j, tree[item.seq * num_new + j], bits)
        index = jnp.clip(position - new, 0, num_new - 1)
        seen &= (position < new) | ((jnp.right_shift(bits, index) & 1) == 1)
    return seen


def _owned_words(shape: DecodeShape, item: ItemView) -> Array:
    """Masks of 32-bit words that keep the values of positions an item may see, and clear the rest.

    Positions nobody owns may hold NaN, which a zero weight would not remove.
    """
    size = (shape.blocks.block_tokens // shape.packing, shape.geometry.value_width)
    first = lax.broadcasted_iota(jnp.int32, size, 0) * shape.packing
    hi, lo = _spread(item.hi, size), -_spread(item.behind, size)

    def keeps(part: int) -> Array:
        keep = first + part < hi
        return keep & (first + part >= lo) if shape.scoring.has_window else keep

    return _words_of(shape, keeps, size)


def _words_of(shape: DecodeShape, keeps: Callable[[int], Array], size: tuple[int, int]) -> Array:
    """Masks of 32-bit words; `keeps` says where the n-th of the rows sharing a word is kept."""
    words = jnp.zeros(size, jnp.int32)
    bits = WORD_BITS // shape.packing
    for part in range(shape.packing):
        element = ((1 << bits) - 1) << (part * bits)
        signed = element - (1 << WORD_BITS) if element >> (WORD_BITS - 1) else element
        words |= jnp.where(keeps(part), jnp.int32(signed), 0)
    return words
