"""The chunk kernel's work list, and the index arithmetic of its items and KV blocks.

An item is one query block of one sequence: `q_tokens` packed tokens from a tile border on. Its KV
blocks are first those of the context (positions before the step, in pages), then those of the new
tokens (packed, not yet in pages). Owns which tokens, positions and rows these are; knows nothing
of copies or scores. Everything is int32: positions reach a million and more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.attention.geometry import Geometry
from kernels.attention.pallas.chunk_blocks import IDS_PER_WINDOW, ChunkBlocks, row_tile
from kernels.attention.pallas.tables import StepTables

UNBOUNDED = 1 << 30  # a window wider than any context, far from int32's end


class ChunkWork(NamedTuple):
    """One step's items, the same in all layers.

    Attributes:
        item_seqs, item_blocks: row and number of the query block within the row.
        num_items: how many items are real.
        cu_q_lens, kv_lens: as the op takes them.
        first_pages, last_pages: page of each row's first and last new position.
        page_ids: the page table in windows of 128 ids, so that a kernel need not hold it all; and
            one more window, so that the one after any window exists.
    """

    item_seqs: Int[Array, "M"]
    item_blocks: Int[Array, "M"]
    num_items: Int[Array, ""]
    cu_q_lens: Int[Array, "B1"]
    kv_lens: Int[Array, "B"]
    first_pages: Int[Array, "B"]
    last_pages: Int[Array, "B"]
    page_ids: Int[Array, "R 1 128"]


class Item(NamedTuple):
    """One query block of one sequence; all scalars.

    Attributes:
        seq: row of the sequence.
        q_start: first token of the block, on a tile border: up to a tile before `first`.
        first, end: the sequence's new tokens.
        q_end: end of those in this block.
        start: position of token `first`.
        lowest: first position any query of the block sees.
        is_first, is_last: whether it is the sequence's first or last block.
        context_block: first KV block of the context that is seen.
        num_context, num_new: KV blocks of either kind.
        new_block: first KV block of the new tokens that is seen.
    """

    seq: Any
    q_start: Any
    first: Any
    end: Any
    q_end: Any
    start: Any
    lowest: Any
    is_first: Any
    is_last: Any
    context_block: Any
    num_context: Any
    num_new: Any
    new_block: Any

    @property
    def num_blocks(self) -> Any:
        return self.num_context + self.num_new

    def position(self, token: Any) -> Any:
        """Position of a packed token of this sequence."""
        return token - self.first + self.start


class KvBlock(NamedTuple):
    """One KV block as an item sees it; all scalars.

    Attributes:
        is_new: rows are new tokens, not yet in pages.
        token: packed token of row 0 (new blocks).
        position: position of row 0.
        low, high: rows that hold positions of this sequence which some query sees.
        masked: whether some query doesn't see some row.
    """

    is_new: Any
    token: Any
    position: Any
    low: Any
    high: Any
    masked: Any


def chunk_work(
    tables: StepTables, *, num_tokens: int, geometry: Geometry, blocks: ChunkBlocks
) -> ChunkWork:
    """Lists the query blocks of the step's chunk rows, row by row."""
    num_rows = tables.kv_lens.shape[0]
    tile, q_tokens, page = row_tile(geometry), blocks.q_tokens, geometry.page_size
    firsts, ends = tables.cu_q_lens[:-1], tables.cu_q_lens[1:]
    most = num_tokens // q_tokens + 2 * min(num_rows, max(num_tokens // 2, 1))

    counts = -(-(ends - firsts // tile * tile) // q_tokens)
    listed = tables.chunk_seqs
    chunk = jnp.arange(num_rows, dtype=jnp.int32)
    borders = jnp.cumsum(jnp.where(chunk < tables.num_chunks, counts[listed], 0), dtype=jnp.int32)
    index = jnp.arange(most, dtype=jnp.int32)
    nth = jnp.searchsorted(borders, index, side="right", method="compare_all")
    nth = jnp.minimum(nth, num_rows - 1).astype(jnp.int32)
    seqs = listed[nth]
    item_blocks = index - (borders[nth] - counts[seqs])

    table = jnp.pad(tables.page_table, ((0, 0), (0, -tables.page_table.shape[1] % IDS_PER_WINDOW)))
    starts = tables.kv_lens - (ends - firsts)
    row = jnp.arange(num_rows)
    clipped = lambda p: jnp.clip(p // page, 0, table.shape[1] - 1)  # noqa: E731
    return ChunkWork(
        seqs,
        item_blocks,
        borders[-1],
        tables.cu_q_lens,
        tables.kv_lens,
        table[row, clipped(starts)],
        table[row, clipped(tables.kv_lens - 1)],
        jnp.pad(table.reshape(-1, 1, IDS_PER_WINDOW), ((0, 1), (0, 0), (0, 0))),
    )


def item_at(
    index: Any, work: ChunkWork, window: Any, *, tile: int, q_tokens: int, kv_block: int
) -> Item:
    """Item `index` of `work` (arrays, or their refs in scalar memory); `window` 0 sees all."""
    seq = work.item_seqs[index]
    first, end = work.cu_q_lens[seq], work.cu_q_lens[seq + 1]
    start = work.kv_lens[seq] - (end - first)
    base = first & -tile
    q_start = base + work.item_blocks[index] * q_tokens
    q_end = jnp.minimum(q_start + q_tokens, end)
    shift = _log2(kv_block)

    first_query = jnp.maximum(q_start, first) - first + start
    lowest = jnp.maximum(first_query - jnp.where(window > 0, window, UNBOUNDED) + 1, 0)
    context_block = lowest >> shift
    context_end = (start + kv_block - 1) >> shift
    num_context = jnp.where(lowest < start, context_end - context_block, 0)
    new_block = jnp.maximum(lowest - start + first - base, 0) >> shift
    new_end = (q_end - base + kv_block - 1) >> shift
    return Item(
        seq,
        q_start,
        first,
        end,
        q_end,
        start,
        lowest,
        q_start == base,
        q_end == end,
        context_block,
        num_context,
        new_end - new_block,
        new_block,
    )


def block_at(item: Item, nth: Any, window: Any, *, tile: int, kv_block: int) -> KvBlock:
    """The `nth` KV block of an item."""
    is_new = nth >= item.num_context
    shift = _log2(kv_block)
    token = (item.first & -tile) + ((item.new_block + nth - item.num_context) << shift)
    position = jnp.where(is_new, item.position(token), (item.context_block + nth) << shift)
    begin = jnp.where(is_new, jnp.maximum(item.start, item.lowest), item.lowest)
    stop = jnp.where(is_new, item.position(item.end), item.start)
    low = jnp.maximum(begin - position, 0)
    high = jnp.minimum(stop - position, kv_block)
    first_query = item.position(jnp.maximum(item.q_start, item.first))
    last_query = item.position(item.q_end) - 1
    above = position + kv_block - 1 > first_query
    below = position <= last_query - jnp.where(window > 0, window, UNBOUNDED)
    masked = (low > 0) | (high < kv_block) | above | below
    return KvBlock(is_new, token, position, low, high, masked)


def _log2(size: int) -> int:
    return size.bit_length() - 1
