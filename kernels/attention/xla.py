"""Ragged paged attention through XLA alone: the CPU path, and the fallback of every platform.

Two loops over groups of query blocks, both with trip counts taken from the data, so padding rows
and unused positions cost nothing: sequences with one query (decodes) go many per group, chunks go
in blocks of `CHUNK_BLOCK` queries. Each group runs an online softmax (Milakov and Gimelshein,
arXiv:1805.02867) over blocks of positions up to the furthest one of the group.
Knows nothing of TPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.attention.cache_layout import read_kv_block, write_kv
from kernels.attention.ragged import TokenPlaces, locate_tokens

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


def attention_work(
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    num_tokens: int,
    page_size: int,
) -> XlaWork:
    """Computes what all layers of one step share: decode blocks (one query) and chunk blocks.

    The arrays are those of `ragged_paged_attention`, which takes the result as `work`.
    """
    places = locate_tokens(page_table, kv_lens, cu_q_lens, num_seqs, num_tokens, page_size)
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


def xla_attention(
    q: Float[Array, "T N H"],
    k_new: Float[Array, "T K H"],
    v_new: Float[Array, "T K H"],
    cache: Float[Array, "L P 2 K S H"],
    layer: Int[Array, ""],
    work: XlaWork,
    *,
    scale: float,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K S H"]]:
    """Same contract as the reference, with the step's `work` list computed beforehand."""
    cache = write_kv(cache, layer, k_new, v_new, work.places.pages, work.places.slots)
    out = jnp.zeros(q.shape, jnp.float32)
    groups = [(work.decodes, DECODES_PER_GROUP, DECODE_KV_BLOCK)]
    if q.shape[0] > 1:  # a chunk has at least two tokens
        groups.append((work.chunks, CHUNKS_PER_GROUP, KV_BLOCK))
    scaled = q.astype(jnp.float32) * scale
    for blocks, per_group, kv_block in groups:
        out = _attend_blocks(scaled, cache, layer, work, blocks, out, per_group, kv_block)
    return out.astype(q.dtype), cache


def _attend_blocks(
    q: Float[Array, "T N H"],
    cache: Float[Array, "L P 2 K S H"],
    layer: Int[Array, ""],
    work: XlaWork,
    blocks: QueryBlocks,
    out: Float[Array, "T N H"],
    per_group: int,
    kv_block: int,
) -> Float[Array, "T N H"]:
    """Loops over groups of blocks and scatters each group's result to its tokens."""
    per_group = min(per_group, blocks.seqs.shape[0])

    def attend_group(i: Int[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        def members(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * per_group, per_group)

        tokens, is_query = members(blocks.tokens), members(blocks.is_query)
        positions = jnp.where(is_query, work.places.positions[tokens], -1)
        pages = work.page_table[members(blocks.seqs)]
        result = _online_softmax(q[tokens], positions, pages, cache, layer, kv_block)
        targets = jnp.where(is_query, tokens, q.shape[0])
        return out.at[targets].set(result, mode="drop")

    return jax.lax.fori_loop(0, -(-blocks.count // per_group), attend_group, out)


def _online_softmax(
    q: Float[Array, "G Q N H"],
    positions: Int[Array, "G Q"],
    pages: Int[Array, "G W"],
    cache: Float[Array, "L P 2 K S H"],
    layer: Int[Array, ""],
    kv_block: int,
) -> Float[Array, "G Q N H"]:
    """Attends `Q` queries per member to positions `0 .. positions`; -1 marks no query."""
    num_members, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size = cache.shape[3], cache.shape[4]
    per_block = max(kv_block // page_size, 1)
    block_len = per_block * page_size
    rows = num_queries * (num_heads // num_kv_heads)
    # Query rows of one KV head lie together: [G, K, Q * N/K, H].
    grouped = q.reshape(num_members, num_queries, num_kv_heads, -1, head_dim)
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(num_members, num_kv_heads, rows, head_dim)
    row_positions = jnp.repeat(positions, num_heads // num_kv_heads, axis=1)  # [G, rows]
    furthest = jnp.max(positions, axis=1)  # [G]

    def add_block(j: Int[Array, ""], state: tuple[Array, Array, Array]):
        top, denominator, acc = state
        block_pages = jax.lax.dynamic_slice_in_dim(pages, j * per_block, per_block, axis=1)
        # Without the barrier XLA CPU looks the page up again for every element it gathers.
        block_pages = jax.lax.optimization_barrier(block_pages)
        keys, values = read_kv_block(cache, layer, block_pages)  # [G, K, block_len, H]
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        place = j * block_len + jnp.arange(block_len)
        scores = jnp.einsum("gkrh,gksh->gkrs", grouped, keys)
        visible = place <= row_positions[:, None, :, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        values = jnp.where(place[:, None] <= furthest[:, None, None, None], values, 0.0)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        denominator = denominator * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + jnp.einsum("gkrs,gksh->gkrh", weights, values)
        return new_top, denominator, acc

    lowest = jnp.finfo(jnp.float32).min  # finite: a row that sees nothing stays free of NaN
    start = (
        jnp.full((num_members, num_kv_heads, rows), lowest),
        jnp.zeros((num_members, num_kv_heads, rows)),
        jnp.zeros((num_members, num_kv_heads, rows, head_dim)),
    )
    num_blocks = jnp.max(furthest) // block_len + 1
    _, denominator, acc = jax.lax.fori_loop(0, num_blocks, add_block, start)
    result = acc / jnp.maximum(denominator, 1e-30)[..., None]
    result = result.reshape(num_members, num_kv_heads, num_queries, -1, head_dim)
    return jnp.moveaxis(result, 1, 2).reshape(q.shape)
