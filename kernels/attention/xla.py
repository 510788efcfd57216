"""Ragged paged attention through XLA alone: the CPU path, and the fallback of every platform.

Two loops over groups of query blocks, both with trip counts taken from the data, so padding rows
and unused positions cost nothing: sequences with one query (decodes) go many per group, chunks go
in blocks of `CHUNK_BLOCK` queries. Each group runs an online softmax (Milakov and Gimelshein,
arXiv:1805.02867) over blocks of positions up to the furthest one of the group. With a sliding
window each member starts at the first page its window reaches: pages left of it are never read.
Knows nothing of TPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.attention.cache_layout import read_kv_block, write_kv
from kernels.attention.geometry import Scoring
from kernels.attention.options import LayerData
from kernels.attention.ragged import (
    BatchTables,
    TokenPlaces,
    locate_tokens,
    sees_branch,
    tree_bits,
)

KV_BLOCK = 128  # positions read per step of the inner loop for chunks
DECODE_KV_BLOCK = 64  # the same for decodes: short contexts read little beyond their end
CHUNK_BLOCK = 32  # queries of one sequence computed together
DECODES_PER_GROUP = 8
CHUNKS_PER_GROUP = 1


class QueryBlocks(NamedTuple):
    """`M` blocks of up to `Q` queries, each of one sequence; the first `count` are real."""

    seqs: Int[Array, "M"]
    tokens: Int[Array, "M Q"]
    is_query: Bool[Array, "M Q"]
    count: Int[Array, ""]


class XlaWork(NamedTuple):
    """Everything about a step that is the same in all layers."""

    places: TokenPlaces
    decodes: QueryBlocks
    chunks: QueryBlocks
    page_table: Int[Array, "B W"]


def xla_work(tables: BatchTables, *, num_tokens: int, page_size: int) -> XlaWork:
    """Computes what all layers of one step share: decode blocks (one query) and chunk blocks."""
    page_table, kv_lens, cu_q_lens, num_seqs = tables
    places = locate_tokens(tables, num_tokens, page_size)
    q_lens = jnp.where(jnp.arange(kv_lens.shape[0]) < num_seqs, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    decodes = _query_blocks(jnp.where(q_lens == 1, 1, 0), cu_q_lens, 1, num_tokens)
    chunks = _query_blocks(jnp.where(q_lens > 1, q_lens, 0), cu_q_lens, CHUNK_BLOCK, num_tokens)
    # A whole number of KV blocks, so that no slice of the table reaches past its end.
    pages_per_block = max(KV_BLOCK // page_size, 1)
    surplus = -page_table.shape[1] % pages_per_block
    return XlaWork(places, decodes, chunks, jnp.pad(page_table, ((0, 0), (0, surplus))))


def _query_blocks(
    q_lens: Int[Array, "B"], cu_q_lens: Int[Array, "B1"], block: int, num_tokens: int
) -> QueryBlocks:
    num_seqs = q_lens.shape[0]
    per_group = DECODES_PER_GROUP if block == 1 else CHUNKS_PER_GROUP
    most = num_seqs if block == 1 else num_tokens // block + min(num_seqs, num_tokens // 2)
    most = -(-max(most, 1) // per_group) * per_group
    ends = jnp.cumsum(-(-q_lens // block))
    index = jnp.arange(most, dtype=jnp.int32)
    seqs = jnp.searchsorted(ends, index, side="right", method="compare_all")
    seqs = jnp.clip(seqs, 0, num_seqs - 1).astype(jnp.int32)
    nth = index - (ends[seqs] + q_lens[seqs] // -block)
    offsets = nth[:, None] * block + jnp.arange(block)
    is_query = (index < ends[-1])[:, None] & (offsets < q_lens[seqs][:, None])
    tokens = jnp.where(is_query, cu_q_lens[seqs][:, None] + offsets, 0)
    return QueryBlocks(seqs, tokens.astype(jnp.int32), is_query, ends[-1])


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer as every group of blocks sees it."""

    cache: Array
    data: LayerData
    scoring: Scoring
    value_width: int


class _Queries(NamedTuple):
    """`G` blocks of `Q` queries, each of one sequence; position -1 marks no query.

    `tree` and `firsts` (position of the row's first new token) are None where no tree applies.
    """

    q: Float[Array, "G Q N H"]
    positions: Int[Array, "G Q"]
    pages: Int[Array, "G W"]
    tree: Int[Array, "G Q"] | None
    firsts: Int[Array, "G"] | None


def xla_attention(
    q: Float[Array, "T N Hk"],
    k_new: Array,
    v_new: Array | None,
    cache: Array,
    data: LayerData,
    work: XlaWork,
    *,
    scoring: Scoring,
    value_width: int,
    decode_queries: int,
) -> tuple[Float[Array, "T N Hv"], Array]:
    """Same contract as the reference, with the step's `work` list computed beforehand."""
    cache = write_kv(cache, data.layer, k_new, v_new, work.places.pages, work.places.slots)
    layer = _Layer(cache, data, scoring, value_width)
    bits = None
    if data.tree is not None:
        bits = tree_bits(data.tree, work.places, decode_queries)
    out = jnp.zeros((*q.shape[:2], value_width), jnp.float32)
    groups = [(work.decodes, DECODES_PER_GROUP, DECODE_KV_BLOCK)]
    if q.shape[0] > 1:  # a chunk has at least two tokens
        groups.append((work.chunks, CHUNKS_PER_GROUP, KV_BLOCK))
    scaled = q.astype(jnp.float32) * scoring.scale
    for blocks, per_group, kv_block in groups:
        out = _attend_blocks(scaled, bits, layer, work, blocks, out, per_group, kv_block)
    return out, cache


def _attend_blocks(
    q: Float[Array, "T N Hk"],
    bits: Int[Array, "T"] | None,
    layer: _Layer,
    work: XlaWork,
    blocks: QueryBlocks,
    out: Float[Array, "T N Hv"],
    per_group: int,
    kv_block: int,
) -> Float[Array, "T N Hv"]:
    """Loops over groups of blocks and scatters each group's result to its tokens."""
    per_group = min(per_group, blocks.seqs.shape[0])

    def attend_group(i: Int[Array, ""], out: Float[Array, "T N Hv"]) -> Float[Array, "T N Hv"]:
        def members(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * per_group, per_group)

        tokens, is_query = members(blocks.tokens), members(blocks.is_query)
        group = _Queries(
            q[tokens],
            jnp.where(is_query, work.places.positions[tokens], -1),
            work.page_table[members(blocks.seqs)],
            None if bits is None else bits[tokens],
            None if bits is None else work.places.firsts[tokens[:, 0]],
        )
        result = _online_softmax(group, layer, kv_block)
        targets = jnp.where(is_query, tokens, q.shape[0])
        return out.at[targets].set(result, mode="drop")

    return jax.lax.fori_loop(0, -(-blocks.count // per_group), attend_group, out)


def _online_softmax(group: _Queries, layer: _Layer, kv_block: int) -> Float[Array, "G Q N Hv"]:
    """Attends each query to the positions it sees, block of pages by block of pages."""
    num_members, num_queries, num_heads, _ = group.q.shape
    _, _, _, num_kv_heads, page_size, _ = layer.cache.shape
    per_block = max(kv_block // page_size, 1)
    grouped = _by_kv_head(group.q, num_kv_heads)
    furthest = jnp.max(group.positions, axis=1)  # [G]
    first_page = _first_pages(group, layer.data.window, page_size)

    def add_block(j: Int[Array, ""], state: tuple[Array, Array, Array]):
        top, denominator, acc = state
        block_pages, place = _block(group.pages, first_page, j * per_block, per_block, page_size)
        # Without the barrier XLA CPU looks the page up again for every element it gathers.
        block_pages = jax.lax.optimization_barrier(block_pages)
        keys, values = read_kv_block(layer.cache, layer.data.layer, block_pages, layer.value_width)
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        scores = jnp.einsum("gkrh,gksh->gkrs", grouped, keys)  # [G, K, Q * N/K, block]
        if layer.scoring.soft_cap is not None:
            scores = layer.scoring.soft_cap * jnp.tanh(scores / layer.scoring.soft_cap)
        visible = _visible(group, layer.data.window, place)  # [G or 1, Q, block]
        by_row = jnp.repeat(visible, num_heads // num_kv_heads, axis=1)[:, None]
        scores = jnp.where(by_row, scores, -jnp.inf)
        # Selected, not multiplied by 0: slots nobody owns may hold NaN.
        used = place <= furthest[:, None]
        if layer.data.window is not None:
            used &= jnp.any(visible, axis=1)
        values = jnp.where(used[:, None, :, None], values, 0.0)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        denominator = denominator * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + jnp.einsum("gkrs,gksh->gkrh", weights, values)
        return new_top, denominator, acc

    num_pages = jnp.max(furthest // page_size + 1 - first_page)
    start = _start(grouped, layer, num_queries)
    _, denominator, acc = jax.lax.fori_loop(0, -(-num_pages // per_block), add_block, start)
    result = acc / jnp.maximum(denominator, 1e-30)[..., None]
    result = result.reshape(num_members, num_kv_heads, num_queries, -1, layer.value_width)
    return jnp.moveaxis(result, 1, 2).reshape(num_members, num_queries, num_heads, -1)


def _by_kv_head(q: Float[Array, "G Q N H"], num_kv_heads: int) -> Float[Array, "G K R H"]:
    """Query rows of one KV head together: `R` = Q * N/K, queries leading."""
    num_members, num_queries, num_heads, width = q.shape
    split = q.reshape(num_members, num_queries, num_kv_heads, -1, width)
    rows = num_queries * (num_heads // num_kv_heads)
    return jnp.moveaxis(split, 2, 1).reshape(num_members, num_kv_heads, rows, width)


def _start(
    grouped: Float[Array, "G K R H"], layer: _Layer, num_queries: int
) -> tuple[Array, Array, Array]:
    """Maximum, denominator and sum before the first block: a sink is there from the start."""
    num_members, num_kv_heads, rows, _ = grouped.shape
    lowest = float(jnp.finfo(jnp.float32).min)  # finite: a row that sees nothing stays free of NaN
    top = jnp.full((num_members, num_kv_heads, rows), lowest)
    denominator = jnp.zeros_like(top)
    if layer.data.sinks is not None:
        sinks = jnp.tile(layer.data.sinks.reshape(num_kv_heads, -1), (1, num_queries))
        top = jnp.maximum(top, sinks)
        denominator = jnp.exp(sinks - top)
    return top, denominator, jnp.zeros((*top.shape, layer.value_width))


def _first_pages(
    group: _Queries, window: Int[Array, ""] | None, page_size: int
) -> Int[Array, "G"] | int:
    """The first entry of the page table that each member's queries see; 0 without a window."""
    if window is None:
        return 0
    first = group.positions[:, 0] - window + 1  # queries of a block ascend
    return jnp.where(window > 0, jnp.maximum(first, 0) // page_size, 0)


def _block(
    pages: Int[Array, "G W"],
    first_page: Int[Array, "G"] | int,
    start: Int[Array, ""],
    per_block: int,
    page_size: int,
) -> tuple[Int[Array, "G pages"], Int[Array, "G block"]]:
    """A block of pages that begins `start` after each member's first one, and its positions."""
    within = jnp.arange(per_block * page_size)
    if isinstance(first_page, int):
        block_pages = jax.lax.dynamic_slice_in_dim(pages, start, per_block, axis=1)
        return block_pages, (start * page_size + within)[None]
    nth = (first_page + start)[:, None]
    entries = jnp.minimum(nth + jnp.arange(per_block), pages.shape[1] - 1)
    return jnp.take_along_axis(pages, entries, axis=1), nth * page_size + within


def _visible(
    group: _Queries, window: Int[Array, ""] | None, place: Int[Array, "G block"]
) -> Bool[Array, "G Q block"]:
    """Which positions of a block each query sees."""
    place, own = place[:, None], group.positions[..., None]
    visible = place <= own
    if window is not None:
        visible &= (window <= 0) | (place > own - window)
    if group.tree is not None and group.firsts is not None:
        visible &= sees_branch(group.tree[..., None], place, group.firsts[:, None, None])
    return visible
