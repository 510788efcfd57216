"""Every copy of the chunk kernel: KV blocks in, queries in, outputs out, new K/V into pages.

Owns the order of copies and waits, and nothing else: what a row means is said by `chunk_work`.

KV blocks are started in the order in which they are computed on, `kv_slots - 1` of them ahead and
across items; a cursor in scalar memory stands at the next one. The ids of its pages are fetched
one block earlier, when they lie in another window of the page table.

New K/V go to pages in tiles. Packed tokens and positions differ by a constant within a sequence,
so an item's rows are turned by that constant once (beside the last division of the item before),
merged with what the first and the last tile hold of others, and sent. The first tile also holds
positions that all items of the sequence read as context: it is held back until the last one has
been computed.
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

from kernels.attention.cache_layout import NULL_PAGE
from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas.chunk_blocks import IDS_PER_WINDOW, ChunkBlocks, row_tile
from kernels.attention.pallas.chunk_work import ChunkWork, Item, KvBlock, block_at, item_at
from kernels.chips import SUBLANES

# Words of the cursor in scalar memory; the item under it follows them. What `start_whole` finds out
# about the block under the cursor is left for `advance`: whether it exists, is the item's last, has
# a tail; and the row of page ids that the block after it needs, or -1 (none, or nothing comes).
NEXT_ITEM, NEXT_BLOCK, NEXT_SLOT, IDS_ROW, IDS_ON_THEIR_WAY, TILES_ON_THEIR_WAY, HIDING = range(7)
EXISTS, IS_LAST, HAS_TAIL, ROW_AFTER = range(7, 11)
ITEM_WORDS = 16
CURSOR_WORDS = ITEM_WORDS + len(Item._fields)
# Words that describe the block in a KV slot. A whole block is full, or one transfer at any rate; a
# plain one is full and seen by all; the own row is that of the query block's first token.
WHOLE, POSITION, LOW, HIGH, MASKED, OWN_ROW, PLAIN = range(7)


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
    ring: Any
    sems: dict[str, Any]

    @property
    def tile(self) -> int:
        return row_tile(self.geometry)

    @property
    def page_shift(self) -> int:
        return _log2(self.geometry.page_size)

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


def start_whole(mem: Memory, group: Any, num_groups: int) -> None:
    """Starts one group's share of the whole transfers of the block under the cursor.

    No branches, so that a step's arithmetic hides the scalar work: a page that is not wanted is a
    transfer of no plane.
    """
    item, slot, planes = _item_under_cursor(mem), mem.cursor[NEXT_SLOT], mem.geometry.num_planes
    exists = mem.cursor[NEXT_ITEM] < mem.work.num_items
    block = mem.block(item, mem.cursor[NEXT_BLOCK])
    _leave_words(mem, item, block, exists)
    is_first = exists if num_groups == 1 else exists & (group == 0)
    wanted = jnp.where(is_first & block.is_new, planes, 0)
    _new_copy(mem, jnp.where(block.is_new, block.token, 0), slot, wanted).start()

    page_size, kv_block = mem.geometry.page_size, mem.blocks.kv_block
    piece = min(page_size, kv_block)
    pieces = kv_block // piece
    share = -(-pieces // num_groups)
    in_pages = exists & ~block.is_new
    first = block.position >> mem.page_shift
    for i in range(share):
        number = group * share + i
        row = pl.multiple_of(jnp.minimum(number, pieces - 1) * piece, piece)
        is_whole = (number < pieces) & (row + piece > block.low) & (row + piece <= block.high)
        wanted = jnp.where(in_pages & is_whole, planes, 0)
        named = mem.ids[0, (first + number) & (IDS_PER_WINDOW - 1)]
        page = jnp.where(wanted > 0, named, NULL_PAGE)  # there may be no ids yet
        inside = 0 if piece == page_size else block.position & (page_size - 1)
        pltpu.make_async_copy(
            mem.cache.at[mem.layer, page, pl.ds(0, wanted), :, pl.ds(inside, piece), :],
            mem.vmem["kv"].at[slot, pl.ds(0, wanted), :, pl.ds(row, piece), :],
            mem.sems["kv"].at[slot],
        ).start()


def _new_copy(mem: Memory, token: Any, slot: Any, planes: Any) -> Any:
    # One tile of padding stands in front of the first token.
    row = pl.multiple_of(token + mem.tile, mem.tile)
    return pltpu.make_async_copy(
        mem.hbm_new.at[pl.ds(0, planes), :, pl.ds(row, mem.blocks.kv_block), :],
        mem.vmem["kv"].at[slot, pl.ds(0, planes)],
        mem.sems["kv"].at[slot],
    )


def _leave_words(mem: Memory, item: Item, block: KvBlock, exists: Any) -> None:
    """Describes the block under the cursor, for `advance` and for whoever computes on it."""
    cursor, slot = mem.cursor, mem.cursor[NEXT_SLOT]
    full = (block.low == 0) & (block.high == mem.blocks.kv_block)
    whole = block.is_new | full
    own_row = item.position(item.q_start) - block.position
    nth = cursor[NEXT_BLOCK] + 1
    is_last = nth == item.num_blocks
    in_pages = ~is_last & (nth < item.num_context)
    row_after = jnp.where(in_pages, _ids_row(mem, item, block.position + mem.blocks.kv_block), -1)
    words = (
        whole,
        block.position,
        block.low,
        block.high,
        block.masked,
        own_row,
        full & ~block.masked,
    )
    for name, word in enumerate(words):
        mem.ring[slot, name] = word.astype(jnp.int32)
    for name, word in ((EXISTS, exists), (IS_LAST, is_last), (HAS_TAIL, ~whole)):
        cursor[name] = word.astype(jnp.int32)
    cursor[ROW_AFTER] = row_after


def advance(mem: Memory) -> None:
    """Starts what `start_whole` left of the block under the cursor, and moves the cursor on."""
    cursor = mem.cursor

    @pl.when(cursor[EXISTS] == 1)
    def _() -> None:
        slot, is_last = cursor[NEXT_SLOT], cursor[IS_LAST] == 1

        @pl.when(cursor[HAS_TAIL] == 1)
        def _() -> None:
            _tail_copies(mem, slot, lambda copy: copy.start())

        cursor[NEXT_BLOCK] = jnp.where(is_last, 0, cursor[NEXT_BLOCK] + 1)
        cursor[NEXT_SLOT] = jnp.where(slot + 1 == mem.blocks.kv_slots, 0, slot + 1)
        pl.when(is_last)(lambda: put_cursor(mem, cursor[NEXT_ITEM] + 1))
        start_ids(mem)


def _tail_copies(mem: Memory, slot: Any, act: Callable[[Any], None]) -> None:
    """Calls `act` on the tiles of a context block's last, partly filled page."""
    piece_shift = _log2(min(mem.geometry.page_size, mem.blocks.kv_block))
    tile_shift = _log2(mem.tile)
    high = mem.ring[slot, HIGH]

    @pl.loop(high >> piece_shift << (piece_shift - tile_shift), (high + mem.tile - 1) >> tile_shift)
    def _(i: Any) -> None:
        row = pl.multiple_of(i * mem.tile, mem.tile)
        position = mem.ring[slot, POSITION] + row
        page = mem.ids[0, (position >> mem.page_shift) & (IDS_PER_WINDOW - 1)]
        act(
            pltpu.make_async_copy(
                mem.page_rows(page, position, mem.tile),
                mem.vmem["kv"].at[slot, :, :, pl.ds(row, mem.tile), :],
                mem.sems["kv"].at[slot],
            )
        )


def wait_for_block(mem: Memory, slot: Any) -> None:
    """Waits for the bytes of a block; the transfers that brought them need not be told apart."""
    planes, piece = mem.geometry.num_planes, min(mem.geometry.page_size, mem.blocks.kv_block)
    whole = mem.ring[slot, WHOLE] == 1
    shift = _log2(piece)

    @pl.when(whole)
    def _() -> None:
        _new_copy(mem, 0, slot, planes).wait()

    @pl.when(~whole)
    def _() -> None:
        @pl.loop(mem.ring[slot, LOW] >> shift, mem.ring[slot, HIGH] >> shift)
        def _(_: Any) -> None:
            pltpu.make_async_copy(
                mem.page_rows(0, 0, piece),
                mem.vmem["kv"].at[slot, :, :, pl.ds(0, piece), :],
                mem.sems["kv"].at[slot],
            ).wait()

        _tail_copies(mem, slot, lambda copy: copy.wait())


def put_cursor(mem: Memory, index: Any) -> None:
    """Puts the cursor at an item's first block and notes which page ids that needs."""
    mem.cursor[NEXT_ITEM] = index

    @pl.when(index < mem.work.num_items)
    def _() -> None:
        item = mem.item(index)
        for i, word in enumerate(item):
            mem.cursor[ITEM_WORDS + i] = word.astype(jnp.int32)
        block = mem.block(item, 0)
        row = _ids_row(mem, item, block.position)
        mem.cursor[ROW_AFTER] = jnp.where(block.is_new, -1, row)


def _item_under_cursor(mem: Memory) -> Item:
    words = Item(*(mem.cursor[ITEM_WORDS + i] for i in range(len(Item._fields))))
    return words._replace(is_first=words.is_first == 1, is_last=words.is_last == 1)


def _ids_row(mem: Memory, item: Item, position: Any) -> Any:
    """The row of `page_ids` that names a position's page."""
    windows = (mem.work.page_ids.shape[0] - 1) // mem.work.kv_lens.shape[0]
    return item.seq * windows + (position >> mem.page_shift >> _log2(IDS_PER_WINDOW))


def start_ids(mem: Memory) -> None:
    """Starts fetching the page ids of the block under the cursor, unless they are here."""
    row = mem.cursor[ROW_AFTER]

    @pl.when((row >= 0) & (row != mem.cursor[IDS_ROW]))
    def _() -> None:
        mem.cursor[IDS_ROW] = row
        mem.cursor[IDS_ON_THEIR_WAY] = 1
        pltpu.make_async_copy(mem.work.page_ids.at[row], mem.ids, mem.sems["ids"]).start()


def wait_for_ids(mem: Memory) -> None:
    @pl.when(mem.cursor[IDS_ON_THEIR_WAY] == 1)
    def _() -> None:
        mem.cursor[IDS_ON_THEIR_WAY] = 0
        pltpu.make_async_copy(mem.work.page_ids.at[0], mem.ids, mem.sems["ids"]).wait()


def _log2(size: int) -> int:
    return size.bit_length() - 1


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


def _fresh_copies(mem: Memory, item: Item) -> tuple[Any, Any]:
    """An item's new rows, from a tile before its first token on, and the pages they go to: two
    windows of ids, since the pages may begin in one and end in the next."""
    tokens = pl.ds(pl.multiple_of(item.q_start, mem.tile), mem.blocks.q_tokens + mem.tile)
    windows = pl.ds(_ids_row(mem, item, _landing(mem, item)[0]), 2)
    return (
        pltpu.make_async_copy(
            mem.hbm_new.at[:, :, tokens, :], mem.vmem["fresh"], mem.sems["fresh"]
        ),
        pltpu.make_async_copy(mem.work.page_ids.at[windows], mem.tile_ids, mem.sems["tile_ids"]),
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


def start_fresh(mem: Memory, item: Item) -> None:
    """Starts reading what `write_fresh` needs."""
    for copy in _fresh_copies(mem, item):
        copy.start()
    for needed, copy in _edges(mem, item):
        pl.when(needed)(copy.start)


def _landing(mem: Memory, item: Item) -> tuple[Any, Any]:
    """Where an item's rows go: the tile of its first position, and how far rows move up to it."""
    base = item.position(jnp.maximum(item.q_start, item.first)) & -mem.tile
    return base, base - item.start + item.first - (item.q_start - mem.tile)


def wait_for_fresh(mem: Memory, item: Item) -> None:
    for copy in _fresh_copies(mem, item):
        copy.wait()
    for needed, copy in _edges(mem, item):
        pl.when(needed)(copy.wait)


def turn_fresh(mem: Memory, item: Item, share: Any, num_shares: int) -> None:
    """Turns one share of the heads' new rows from token to position order."""
    planes, heads = mem.geometry.num_planes, mem.geometry.num_kv_heads
    _, by = _landing(mem, item)
    for i in range(-(-planes * heads // num_shares)):
        nth = jnp.minimum(share + i * num_shares, planes * heads - 1)
        plane, head = lax.div(nth, heads), lax.rem(nth, heads)
        mem.vmem["shifted"][plane, head] = _turn(mem.vmem["fresh"][plane, head], by, mem.tile)


def write_fresh(mem: Memory, item: Item) -> None:
    """Merges an item's turned rows with what their tiles hold of others, and sends them."""
    tile, geometry, vmem = mem.tile, mem.geometry, mem.vmem
    base, _ = _landing(mem, item)
    stop = item.position(item.end)
    last_tile = ((stop - 1) & -tile) - base

    def merged(new: jax.Array, old: jax.Array, position: Any) -> jax.Array:
        place = position + lax.broadcasted_iota(jnp.int32, new.shape, 0)
        ours = (place >= item.start) & (place < stop)
        return jnp.where(ours, new, old.astype(jnp.float32)).astype(old.dtype)

    @pl.when(item.is_first | item.is_last)
    def _() -> None:
        @pl.loop(0, geometry.num_planes * geometry.num_kv_heads)
        def _(i: Any) -> None:
            plane, head = lax.div(i, geometry.num_kv_heads), lax.rem(i, geometry.num_kv_heads)

            @pl.when(item.is_first)
            def _() -> None:
                new = vmem["shifted"][plane, head, :tile, :].astype(jnp.float32)
                vmem["held"][plane, head] = merged(new, vmem["edges"][0, plane, head], base)

            @pl.when(item.is_last)
            def _() -> None:
                edge = pl.ds(pl.multiple_of(last_tile, tile), tile)
                new = vmem["shifted"][plane, head, edge, :].astype(jnp.float32)
                old = vmem["edges"][1, plane, head]
                vmem["shifted"][plane, head, edge, :] = merged(new, old, base + last_tile)

    _send_tiles(mem, item, base)


def _turn(rows: jax.Array, by: Any, tile: int) -> jax.Array:
    """Moves rows up, round the end, by a number below two tiles that is known at run time.

    Registers are turned in words of 32 bits, which hold several rows of a narrow dtype. Whole
    registers are only chosen; then words move within and between registers; then bits for the rest.
    """
    per_word = 4 // rows.dtype.itemsize
    words = pltpu.bitcast(rows, jnp.uint32)
    shape = words.shape
    words = words.reshape(shape[0] // SUBLANES, SUBLANES, shape[1])
    up = by >> _log2(per_word)
    registers = 1
    while registers * SUBLANES * per_word < 2 * tile:
        moved = jnp.concatenate([words[registers:], words[:registers]])
        words = jnp.where(up & (registers * SUBLANES) != 0, moved, words)
        registers *= 2
    words = _up_within(words, up & (SUBLANES - 1))
    if per_word > 1:
        bits = ((by & (per_word - 1)) * (32 // per_word)).astype(jnp.uint32)
        # Two shifts, since one by 32 means nothing.
        words = (words >> bits) | ((_up_within(words, 1) << (31 - bits)) << 1)
    return pltpu.bitcast(words.reshape(shape), rows.dtype)


def _up_within(words: jax.Array, by: Any) -> jax.Array:
    """Moves `[registers, 8, lanes]` words up by less than a register, round the end."""
    turned = pltpu.roll(words, (SUBLANES - by) & (SUBLANES - 1), 1)
    following = jnp.concatenate([turned[1:], turned[:1]])
    sublane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    return jnp.where(sublane < SUBLANES - by, turned, following)


def _tile_copy(mem: Memory, source: Any, page: Any, position: Any) -> Any:
    return pltpu.make_async_copy(source, mem.page_rows(page, position, mem.tile), mem.sems["tiles"])


def _send_tiles(mem: Memory, item: Item, base: Any) -> None:
    tile = mem.tile
    next_base = item.position(item.q_start + mem.blocks.q_tokens) & -tile
    stop = jnp.where(item.is_last, item.position(item.end) + tile - 1 & -tile, next_base)
    begin, end = item.is_first.astype(jnp.int32), (stop - base) // tile
    first_id = base >> mem.page_shift & -IDS_PER_WINDOW

    @pl.loop(begin, end)
    def _(i: Any) -> None:
        row = pl.multiple_of(i * tile, tile)
        position = base + row
        nth = (position >> mem.page_shift) - first_id
        page = mem.tile_ids[nth >> _log2(IDS_PER_WINDOW), 0, nth & (IDS_PER_WINDOW - 1)]
        source = mem.vmem["shifted"].at[:, :, pl.ds(row, tile), :]
        _tile_copy(mem, source, page, position).start()

    mem.cursor[TILES_ON_THEIR_WAY] = end - begin


def send_held(mem: Memory, item: Item) -> None:
    """Sends a sequence's first tile, which no item reads any more."""
    page, position = mem.work.first_pages[item.seq], item.start & -mem.tile
    _tile_copy(mem, mem.vmem["held"], page, position).start()
    mem.cursor[TILES_ON_THEIR_WAY] += 1


def wait_for_tiles(mem: Memory) -> None:
    """Waits for the tiles of the item before, whose buffers are needed again."""

    @pl.loop(0, mem.cursor[TILES_ON_THEIR_WAY])
    def _(_: Any) -> None:
        _tile_copy(mem, mem.vmem["held"], 0, 0).wait()
