"""Every copy of the chunk kernel: KV blocks in, queries in, outputs out, new K/V into pages.

Owns the order of copies and waits, and nothing else: what a row means is said by `chunk_work`.

KV blocks are started in the order in which they are computed on, `kv_slots - 1` of them ahead and
across items; a cursor in scalar memory stands at the next one. The ids of its pages are fetched
one block earlier, when they lie in another window of the page table.

New K/V go to pages in tiles. Packed tokens and positions differ by a constant within a sequence,
so an item's rows are turned by that constant once, merged with what the first and the last tile
hold of others, and sent. The first tile also holds positions that later items of the sequence read
as context: it is held back until the sequence's last item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas.chunk_blocks import IDS_PER_WINDOW, ChunkBlocks, row_tile
from kernels.attention.pallas.chunk_work import ChunkWork, Item, KvBlock, block_at, item_at

# Words of the cursor in scalar memory.
NEXT_ITEM, NEXT_BLOCK, NEXT_SLOT, IDS_ROW, IDS_ON_THEIR_WAY, TILES_ON_THEIR_WAY = range(6)


@dataclass(frozen=True)
class Memory:
    """The kernel's refs and static facts; refs are named as in `chunk_blocks.vmem_buffers`."""

    geometry: Geometry
    scoring: Scoring
    blocks: ChunkBlocks
    work: ChunkWork
    layer: Any
    window: Any
    hbm_q: Any
    hbm_new: Any
    hbm_out: Any
    cache: Any
    sinks: Any
    vmem: dict[str, Any]
    ids: Any
    tile_ids: Any
    cursor: Any
    sems: dict[str, Any]

    @property
    def tile(self) -> int:
        return row_tile(self.geometry)

    @property
    def page_shift(self) -> int:
        return self.geometry.page_size.bit_length() - 1

    def item(self, index: Any) -> Item:
        sizes = dict(q_tokens=self.blocks.q_tokens, kv_block=self.blocks.kv_block)
        return item_at(index, self.work, self.window, tile=self.tile, **sizes)

    def block(self, item: Item, nth: Any) -> KvBlock:
        return block_at(item, nth, self.window, tile=self.tile, kv_block=self.blocks.kv_block)

    def page_rows(self, page: Any, position: Any, rows: int) -> Any:
        """`rows` positions of a page of this layer, from `position` on, all planes and heads."""
        slot = pl.multiple_of(position & (self.geometry.page_size - 1), self.tile)
        return self.cache.at[self.layer, page, :, :, pl.ds(slot, rows), :]


# --- KV blocks -------------------------------------------------------------------------------


def _context_copies(
    mem: Memory, block: KvBlock, slot: Any, page_of: Callable, act: Callable
) -> None:
    """Calls `act` on every copy of a context block: whole pages, then tiles of the last one."""
    piece = min(mem.geometry.page_size, mem.blocks.kv_block)
    whole = block.high >> (piece.bit_length() - 1)
    tile_shift = mem.tile.bit_length() - 1

    def copy(first_row: Any, rows: int) -> None:
        first_row = pl.multiple_of(first_row, mem.tile)
        position = block.position + first_row
        act(
            pltpu.make_async_copy(
                mem.page_rows(page_of(position), position, rows),
                mem.vmem["kv"].at[slot, :, :, pl.ds(first_row, rows), :],
                mem.sems["kv"].at[slot],
            )
        )

    @pl.loop(block.low >> (piece.bit_length() - 1), whole)
    def _(i: Any) -> None:
        copy(i * piece, piece)

    @pl.loop(
        whole << (piece - 1).bit_length() >> tile_shift, (block.high + mem.tile - 1) >> tile_shift
    )
    def _(i: Any) -> None:
        copy(i * mem.tile, mem.tile)


def _new_copy(mem: Memory, block: KvBlock, slot: Any) -> Any:
    # One tile of padding stands in front of the first token.
    row = pl.multiple_of(block.token + mem.tile, mem.tile)
    return pltpu.make_async_copy(
        mem.hbm_new.at[:, :, pl.ds(row, mem.blocks.kv_block), :],
        mem.vmem["kv"].at[slot],
        mem.sems["kv"].at[slot],
    )


def wait_for_block(mem: Memory, block: KvBlock, slot: Any) -> None:
    @pl.when(block.is_new)
    def _() -> None:
        _new_copy(mem, block, slot).wait()

    @pl.when(~block.is_new)
    def _() -> None:
        _context_copies(mem, block, slot, lambda _: 0, lambda copy: copy.wait())


def start_next_block(mem: Memory) -> None:
    """Starts the block under the cursor, moves the cursor on and fetches its page ids."""
    cursor = mem.cursor

    @pl.when(cursor[NEXT_ITEM] < mem.work.num_items)
    def _() -> None:
        item = mem.item(cursor[NEXT_ITEM])
        nth, slot = cursor[NEXT_BLOCK], cursor[NEXT_SLOT]
        block = mem.block(item, nth)

        @pl.when(block.is_new)
        def _() -> None:
            _new_copy(mem, block, slot).start()

        @pl.when(~block.is_new)
        def _() -> None:
            _wait_for_ids(mem)

            def page_of(position: Any) -> Any:
                return mem.ids[0, (position >> mem.page_shift) & (IDS_PER_WINDOW - 1)]

            _context_copies(mem, block, slot, page_of, lambda copy: copy.start())

        is_last = nth + 1 == item.num_blocks
        cursor[NEXT_ITEM] += is_last.astype(jnp.int32)
        cursor[NEXT_BLOCK] = jnp.where(is_last, 0, nth + 1)
        cursor[NEXT_SLOT] = jnp.where(slot + 1 == mem.blocks.kv_slots, 0, slot + 1)
        start_ids(mem)


def start_ids(mem: Memory) -> None:
    """Starts fetching the page ids of the block under the cursor, unless they are here."""
    cursor = mem.cursor

    @pl.when(cursor[NEXT_ITEM] < mem.work.num_items)
    def _() -> None:
        item = mem.item(cursor[NEXT_ITEM])
        block = mem.block(item, cursor[NEXT_BLOCK])
        windows = mem.work.page_ids.shape[0] // mem.work.kv_lens.shape[0]
        row = item.seq * windows + (block.position >> mem.page_shift) // IDS_PER_WINDOW

        @pl.when(~block.is_new & (row != cursor[IDS_ROW]))
        def _() -> None:
            cursor[IDS_ROW] = row
            cursor[IDS_ON_THEIR_WAY] = 1
            pltpu.make_async_copy(mem.work.page_ids.at[row], mem.ids, mem.sems["ids"]).start()


def _wait_for_ids(mem: Memory) -> None:
    @pl.when(mem.cursor[IDS_ON_THEIR_WAY] == 1)
    def _() -> None:
        mem.cursor[IDS_ON_THEIR_WAY] = 0
        pltpu.make_async_copy(mem.work.page_ids.at[0], mem.ids, mem.sems["ids"]).wait()


# --- queries and outputs ---------------------------------------------------------------------


def query_copy(mem: Memory, item: Item, parity: Any) -> Any:
    tokens = pl.ds(pl.multiple_of(item.q_start, mem.tile), mem.blocks.q_tokens)
    return pltpu.make_async_copy(
        mem.hbm_q.at[:, tokens, :], mem.vmem["q"].at[parity], mem.sems["q"].at[parity]
    )


def output_copy(mem: Memory, item: Item, parity: Any) -> Any:
    tokens = pl.ds(pl.multiple_of(item.q_start, mem.tile), mem.blocks.q_tokens)
    return pltpu.make_async_copy(
        mem.vmem["out"].at[parity], mem.hbm_out.at[:, tokens, :], mem.sems["out"]
    )


# --- new K/V to pages ------------------------------------------------------------------------


def _fresh_copies(mem: Memory, index: Any, item: Item) -> tuple[Any, Any]:
    """An item's new rows, from a tile before its first token on, and the pages they go to."""
    rows = mem.blocks.q_tokens + mem.tile
    tokens = pl.ds(pl.multiple_of(item.q_start, mem.tile), rows)
    return (
        pltpu.make_async_copy(
            mem.hbm_new.at[:, :, tokens, :], mem.vmem["fresh"], mem.sems["fresh"]
        ),
        pltpu.make_async_copy(mem.work.item_pages.at[index], mem.tile_ids, mem.sems["tile_ids"]),
    )


def _edge_copy(mem: Memory, which: int, page: Any, position: Any) -> Any:
    tile_position = position & -mem.tile
    return pltpu.make_async_copy(
        mem.page_rows(page, tile_position, mem.tile),
        mem.vmem["edges"].at[which],
        mem.sems["edges"].at[which],
    )


def _edges(mem: Memory, item: Item) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(condition, copy) of the tiles an item shares with positions outside the new ones."""
    last = item.position(item.end) - 1
    return (
        (item.is_first, _edge_copy(mem, 0, mem.work.first_pages[item.seq], item.start)),
        (item.is_last, _edge_copy(mem, 1, mem.work.last_pages[item.seq], last)),
    )


def start_fresh(mem: Memory, index: Any, item: Item) -> None:
    """Starts reading what `write_fresh` needs."""
    for copy in _fresh_copies(mem, index, item):
        copy.start()
    for needed, copy in _edges(mem, item):
        pl.when(needed)(copy.start)


def write_fresh(mem: Memory, index: Any, item: Item) -> None:
    """Turns an item's new rows from token to position order and sends them to their pages."""
    tile, geometry, vmem = mem.tile, mem.geometry, mem.vmem
    for copy in _fresh_copies(mem, index, item):
        copy.wait()
    for needed, copy in _edges(mem, item):
        pl.when(needed)(copy.wait)
    wait_for_tiles(mem)

    first_position = item.position(jnp.maximum(item.q_start, item.first))
    base = first_position & -tile
    rows = mem.blocks.q_tokens + tile
    turn = base - item.start + item.first - (item.q_start - tile)
    stop = item.position(item.end)
    last_tile = ((stop - 1) & -tile) - base

    def merged(new: jax.Array, old: jax.Array, position: Any) -> jax.Array:
        place = position + lax.broadcasted_iota(jnp.int32, new.shape, 0)
        ours = (place >= item.start) & (place < stop)
        return jnp.where(ours, new, old.astype(jnp.float32)).astype(old.dtype)

    @pl.loop(0, geometry.num_planes * geometry.num_kv_heads)
    def _(i: Any) -> None:
        plane, head = i // geometry.num_kv_heads, i % geometry.num_kv_heads
        # Only 32-bit rows can be turned by any number.
        turned = pltpu.roll(vmem["fresh"][plane, head].astype(jnp.float32), rows - turn, 0)
        vmem["shifted"][plane, head] = turned.astype(vmem["shifted"].dtype)

        @pl.when(item.is_first)
        def _() -> None:
            vmem["held"][plane, head] = merged(turned[:tile], vmem["edges"][0, plane, head], base)

        @pl.when(item.is_last)
        def _() -> None:
            edge = pl.ds(pl.multiple_of(last_tile, tile), tile)
            new = vmem["shifted"][plane, head, edge, :].astype(jnp.float32)
            old = vmem["edges"][1, plane, head]
            vmem["shifted"][plane, head, edge, :] = merged(new, old, base + last_tile)

    _send_tiles(mem, item, first_position, base)


def _tile_copy(mem: Memory, source: Any, page: Any, position: Any) -> Any:
    return pltpu.make_async_copy(source, mem.page_rows(page, position, mem.tile), mem.sems["tiles"])


def _send_tiles(mem: Memory, item: Item, first_position: Any, base: Any) -> None:
    tile = mem.tile
    next_base = item.position(item.q_start + mem.blocks.q_tokens) & -tile
    stop = jnp.where(item.is_last, item.position(item.end) + tile - 1 & -tile, next_base)
    begin, end = item.is_first.astype(jnp.int32), (stop - base) // tile
    first_page = first_position >> mem.page_shift

    @pl.loop(begin, end)
    def _(i: Any) -> None:
        row = pl.multiple_of(i * tile, tile)
        position = base + row
        page = mem.tile_ids[0, (position >> mem.page_shift) - first_page]
        source = mem.vmem["shifted"].at[:, :, pl.ds(row, tile), :]
        _tile_copy(mem, source, page, position).start()

    @pl.when(item.is_last)
    def _() -> None:
        page, position = mem.work.first_pages[item.seq], item.start & -tile
        _tile_copy(mem, mem.vmem["held"], page, position).start()

    mem.cursor[TILES_ON_THEIR_WAY] = end - begin + item.is_last.astype(jnp.int32)


def wait_for_tiles(mem: Memory) -> None:
    """Waits for the tiles of the item before, whose buffers are needed again."""

    @pl.loop(0, mem.cursor[TILES_ON_THEIR_WAY])
    def _(_: Any) -> None:
        _tile_copy(mem, mem.vmem["held"], 0, 0).wait()
