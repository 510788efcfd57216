"""The decode call: rows of one (or a few) new tokens against their whole paged context.

The work is a flat list of items (sequence, block of positions) that a cursor walks inside the
kernel; nothing is paid per sequence. One step of the loop works on `items_per_step` items in each
of these stages, so that every stage fills the latencies of the others:

    step              t-2          t-1          t            t+1          t+slots-3   t+2*slots-3
    item t+2s-3                                                                       plan
    item t+s-3                                                            fetch
    item t+1                                                 write
    item t                                      score
    item t-1                       softmax
    item t-2          accumulate

    plan        scalars of the item; its line of page ids starts towards SMEM
    fetch       page ids have come: its pages, query and new K/V start towards VMEM
    write       all have come: the new rows are merged into their tile, the tile starts back to HBM
    score       q k^T                     softmax     weights, relative to the item's own maximum
    accumulate  weights v, added to the sequence; what is complete starts towards HBM

Each item has scratch arrays of its own (the loop is unrolled over them): a transfer then never
touches what a stage of the same step reads, and the compiler may overlap them. Items past the last
one move nothing and are arithmetic on leftovers. Transfers that an item may not need are predicated
instructions, so that a step has no branch.

Where pages are small or KV heads few, the two scalar slots of a bundle bind. Hence:
- one wait of each kind per step, for all its items: nothing moves across a wait;
- shifts for divisions, which would cost six instructions: the compiler can't know that no position
  is negative; block and page sizes are powers of two;
- an entry of length 0 behind the last sequence, so that the cursor needs no test for the end;
- the scalars that later stages need as vectors are left in VMEM by the first (`marks`): scalar
  registers are few, and one held for long keeps the next transfers from being prepared.

Owns the call, the cursor and the transfers. The arithmetic is in `decode_stages`, the operands'
layout in `decode_work`, the sizes in `decode_blocks`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import decode_stages as stages
from kernels.attention.pallas.decode_blocks import (
    FILL_STEPS,
    NUM_MARKS,
    NUM_PENDING,
    RECORD_WORDS,
    VMEM_RESERVE,
    DecodeBlocks,
    DecodeShape,
    candidate_blocks,
    check_blocks,
    check_geometry,
    default_blocks,
    smem_bytes,
    vmem_bytes,
)
from kernels.attention.pallas.decode_work import (
    SEQ_WORDS,
    DecodeWork,
    decode_work,
    output_rows,
    token_rows,
)
from kernels.attention.pallas.tables import LayerData
from kernels.chips import LANES, SUBLANES

__all__ = [
    "DecodeBlocks",
    "DecodeWork",
    "candidate_blocks",
    "check_blocks",
    "decode_attention",
    "decode_work",
    "default_blocks",
    "smem_bytes",
    "vmem_bytes",
]

# Fields of an item's record in SMEM. Positions count from the start of its block.
HI, SEQ, BEHIND, LAST, NEW, WRITE_PAGE = range(6)  # and one more page at 6
SEQ_SOUGHT, BASE, LEFT = range(7, 10)  # of the next item to be fetched into the slot
# Rows of an item's `marks`: the same as the record's fields of that name, in every lane. A new
# token that is the only one is nowhere but in the last item.
MARK_HI, MARK_NEW, MARK_BEHIND = range(NUM_MARKS)
# What a step waits for before its arrays are read or reused: pages, tiles and rows in flight.
FETCHED, WRITTEN, STORED = range(NUM_PENDING)
# Words of a sequence in `DecodeWork.seqs`.
LENGTH, NUM_NEW, FIRST_ROW, FIRST_LINE = range(SEQ_WORDS)


class _Hbm(NamedTuple):
    """Operands that stay in HBM; `rows` as `token_rows` makes them."""

    rows: tuple[Array, ...]
    pages: Array
    out: Array
    cache: Array


class _Scalars(NamedTuple):
    """Operands in SMEM."""

    layer: Array
    num_decodes: Array
    window: Array | None
    tree: Array | None
    seqs: Array


class _Scratch(NamedTuple):
    """Everything the kernel allocates.

    An item has its own `kv` and `marks`; other arrays belong to all items of a step, and so do
    semaphores: one wait then covers a step, however many items it has.
    """

    kv: list[Array]
    marks: list[Array]
    rows: list[tuple[Array, ...]]
    out: list[Array]
    stages: list[stages.Stage]
    running: stages.Running
    records: Array
    lines: Array
    pending: Array
    loaded: Array
    fetched: Array
    lined: Array
    stored: Array
    written: Array


class _Kernel:
    """One trace of the kernel: the static sizes, and the references it works on."""

    def __init__(
        self, shape: DecodeShape, scalars: _Scalars, sinks: Array | None, hbm: _Hbm, own: _Scratch
    ) -> None:
        self.shape, self.scalars, self.sinks, self.hbm, self.own = shape, scalars, sinks, hbm, own
        self.slots, self.lanes = shape.blocks.num_slots, shape.blocks.items_per_step
        self.ahead = self.slots - FILL_STEPS  # steps between an item's fetch and its score
        self.num_decodes = scalars.num_decodes[0]
        self.layer: Any = hbm.cache.at[scalars.layer[0]]
        self.window = None if scalars.window is None else scalars.window[0]

    # --- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Fills the pipeline, runs it until the last item is accumulated, drains it."""
        self._clear()
        cursor = (jnp.int32(0), self._first_position(jnp.int32(0)))
        for step in range(self.slots - 1):
            cursor = self._seek(step, cursor)
        for step in range(self.ahead):
            self._wait_lines(step)
            self._fetch(step)
            cursor = self._seek(step + self.slots - 1, cursor)
        self._wait_fetched(0)
        self._write(0)

        def lap(state: tuple[Array, ...]) -> tuple[Array, ...]:
            *cursor, _ = state
            for step in range(self.slots):
                cursor = self._step(step, tuple(cursor))
            return *cursor, self._field(self._slots(-2)[0], HI)

        lax.while_loop(lambda state: state[-1] > 0, lap, (*cursor, jnp.int32(1)))
        for step in range(self.slots):
            self._wait_pending(STORED, step)
            # The last lap itself waited for the other tiles.
            if step == 0 or step >= self.slots - FILL_STEPS:
                self._wait_pending(WRITTEN, step)
            if 0 < step < self.ahead:  # fetched, but never scored
                self._wait_rows(step)
            if step != self.ahead - 1:  # that of the last fetch; the others' ids are unused
                self._wait_lines(step)

    def _step(self, step: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        """One step of every stage. Waits come first: nothing is moved across them."""
        self._wait_fetched(step + 1)
        self._wait_lines(step + self.ahead)
        self._wait_pending(WRITTEN, step + self.ahead)
        self._wait_pending(STORED, step - 2)

        self._fetch(step + self.ahead)
        cursor = self._seek(step + self.ahead + self.slots - 1, cursor)
        for slot in self._slots(step - 1):
            stage = self._stage(step - 1, slot)
            stages.softmax(self.shape, self._view(slot), self.scalars.tree, self.window, stage)
        for lane, slot in enumerate(self._slots(step - 2)):
            stage, out = self._stage(step - 2, slot), self.own.out[self._ring(step - 2)].at[lane]
            item, kv, run = self._view(slot), self.own.kv[slot], self.own.running
            stages.accumulate(self.shape, item, kv, stage, run, self.sinks, out)
        for lane, slot in enumerate(self._slots(step)):
            queries = self.own.rows[self._ring(step)][0].at[lane]
            stages.score(self.shape, queries, self.own.kv[slot], self._stage(step, slot))
        self._write(step + 1)
        self._store(step - 2)
        return cursor

    # --- items ------------------------------------------------------------------------------

    def _ring(self, step: int) -> int:
        """Where a step's semaphores and arrays are."""
        return step % self.slots

    def _slots(self, step: int) -> list[int]:
        """The slots of a step's items; an item keeps its slot for everything it owns."""
        first = self._ring(step) * self.lanes
        return list(range(first, first + self.lanes))

    def _stage(self, step: int, slot: int) -> stages.Stage:
        return self.own.stages[(step % 2) * self.lanes + slot % self.lanes]

    def _field(self, slot: int, field: int) -> Array:
        return self.own.records[slot * RECORD_WORDS + field]

    def _view(self, slot: int) -> stages.ItemView:
        """An item as its last stages see it."""
        marks = self.own.marks[slot]
        row = lambda mark: marks[mark : mark + 1, :]  # noqa: E731
        seq = self._field(slot, SEQ)
        return stages.ItemView(row(MARK_HI), row(MARK_NEW), row(MARK_BEHIND), seq)

    def _mark(self, slot: int) -> stages.ItemView:
        """An item as its first stage sees it, left in VMEM for the others."""
        hi, last = self._field(slot, HI), self._field(slot, LAST)
        if self.shape.blocks.decode_queries == 1:
            new = jnp.where(last > 0, hi - 1, -1)
        else:
            new = self._field(slot, NEW)
        row = lambda value: jnp.full((1, LANES), value, jnp.int32)  # noqa: E731
        seq, behind = self._field(slot, SEQ), self._field(slot, BEHIND)
        view = stages.ItemView(row(hi), row(new), row(behind), seq)
        marks = self.own.marks[slot]
        for mark, value in ((MARK_HI, view.hi), (MARK_NEW, view.new), (MARK_BEHIND, view.behind)):
            marks[mark : mark + 1, :] = value
        return view

    def _new(self, slot: int, hi: Array) -> Array:
        """Where the new tokens start; of one token: where it lies, if this is the last item."""
        if self.shape.blocks.decode_queries == 1:
            return (hi - 1) & (self.shape.blocks.block_tokens - 1)
        return self._field(slot, NEW)

    def _tiles(self, slot: int) -> list[tuple[Array, Array]]:
        """The tiles an item may have to write: their positions, and whether it has to.

        A position is inside the block even where nothing is written: the merge runs always.
        """
        rows, block = self.shape.write_rows, self.shape.blocks.block_tokens
        hi = self._field(slot, HI)
        new = self._new(slot, hi)
        if self.shape.blocks.decode_queries == 1:
            return [(new & -rows, self._field(slot, LAST) > 0)]
        start = jnp.maximum(new, 0) & (block - rows)
        second = (start + rows) & (block - rows)
        holds_new = hi > jnp.maximum(new, 0)
        return [(start, holds_new), (second, holds_new & (hi > start + rows))]

    def _seq(self, seq: Array, word: int) -> Array:
        return self.scalars.seqs[seq * SEQ_WORDS + word]

    def _first_position(self, seq: Array) -> Array:
        """Start of the first block a sequence reads."""
        if self.window is None:
            return jnp.int32(0)
        return self._first_seen(seq) & -self.shape.blocks.block_tokens

    def _first_seen(self, seq: Array) -> Array:
        """The first position that a sequence's first new token sees."""
        if self.window is None:
            return jnp.int32(0)
        first_new = self._seq(seq, LENGTH) - self._seq(seq, NUM_NEW)
        start = jnp.maximum(first_new + 1 - self.window, 0)
        return jnp.where(self.window > 0, start, 0)

    def _seek(self, step: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        """Notes a step's items from the cursor on, starts their page ids, moves the cursor."""
        for slot in self._slots(step):
            cursor = self._seek_item(step, slot, cursor)
        return cursor

    def _seek_item(self, step: int, slot: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        """Behind the last sequence the cursor stays at an entry of length 0."""
        seq, base = cursor
        block = self.shape.blocks.block_tokens
        left = self._seq(seq, LENGTH) - base
        for field, value in ((SEQ_SOUGHT, seq), (BASE, base), (LEFT, left)):
            self.own.records[slot * RECORD_WORDS + field] = value
        self._start_line(step, slot, self._seq(seq, FIRST_LINE) + (base >> self.shape.line_bits))
        ends = left <= block
        following = jnp.minimum(seq + 1, self.num_decodes)
        return (
            jnp.where(ends, following, seq),
            jnp.where(ends, self._first_position(following), base + block),
        )

    def _start_line(self, step: int, slot: int, line: Array) -> None:
        """Starts an item's page ids towards SMEM."""
        pltpu.make_async_copy(
            self.hbm.pages.at[pl.ds(pl.multiple_of(line * LANES, LANES), LANES)],
            self.own.lines.at[pl.ds(slot * LANES, LANES)],
            self.own.lined.at[self._ring(step)],
        ).start()

    def _record(self, seq: Array, base: Array, left: Array) -> dict[int, Array]:
        """Works out what the stages need to know of the item that was sought."""
        block = self.shape.blocks.block_tokens
        fields = {HI: jnp.minimum(left, block), SEQ: seq, BEHIND: base - self._first_seen(seq)}
        fields[LAST] = ((left > 0) & (left <= block)).astype(jnp.int32)
        if self.shape.blocks.decode_queries > 1:
            fields[NEW] = left - self._seq(seq, NUM_NEW)
        return fields

    # --- transfers ----------------------------------------------------------------------------

    def _fetch(self, step: int) -> None:
        """Starts the pages that hold visible positions, the queries and the new rows."""
        num_pages = jnp.int32(0)
        for lane, slot in enumerate(self._slots(step)):
            seq, base, left = (self._field(slot, f) for f in (SEQ_SOUGHT, BASE, LEFT))
            fields = self._record(seq, base, left)
            for field, value in fields.items():
                self.own.records[slot * RECORD_WORDS + field] = value
            source = self._seq(seq, FIRST_ROW)
            for row, target in zip(self.hbm.rows, self.own.rows[self._ring(step)], strict=True):
                pltpu.make_async_copy(
                    row.at[source], target.at[lane], self.own.loaded.at[self._ring(step)]
                ).start()
            num_pages += self._fetch_pages(step, slot, base)
        self.own.pending[FETCHED * self.slots + self._ring(step)] = num_pages

    def _fetch_pages(self, step: int, slot: int, base: Array) -> Array:
        """Starts an item's pages, and returns how many."""
        num_pages, hi = self.shape.pages, self._field(slot, HI)
        first_id = slot * LANES + ((base >> self.shape.page_bits) & (LANES - 1))
        end = (hi + (self.shape.geometry.page_size - 1)) >> self.shape.page_bits
        first = None
        if self.window is not None:
            first = jnp.maximum(-self._field(slot, BEHIND), 0) >> self.shape.page_bits
        for number in range(num_pages):
            wanted = number < end if first is None else (number >= first) & (number < end)
            copy = pltpu.make_async_copy(
                self.layer.at[self.own.lines[first_id + number]],
                self.own.kv[slot].at[number],
                self.own.fetched.at[self._ring(step)],
            )
            pl.when(wanted)(copy.start)
        for tile, (start, _) in enumerate(self._tiles(slot)):
            page = self.own.lines[first_id + (start >> self.shape.page_bits)]
            self.own.records[slot * RECORD_WORDS + WRITE_PAGE + tile] = page
        return end if first is None else end - first

    def _write(self, step: int) -> None:
        """Merges the new rows into their tiles and starts the tiles towards the cache."""
        count = jnp.int32(0)
        for lane, slot in enumerate(self._slots(step)):
            view, kv = self._mark(slot), self.own.kv[slot]
            new_rows = self.own.rows[self._ring(step)][-1].at[lane]
            tiles = self._tiles(slot)
            for start, _ in tiles:
                stages.write_tile(self.shape, kv, new_rows, view, start)
            for tile, (start, wanted) in enumerate(tiles):
                page = self._field(slot, WRITE_PAGE + tile)
                inside = stages.rows_inside(self.shape, start)
                copy = pltpu.make_async_copy(
                    kv.at[start >> self.shape.page_bits, :, :, inside],
                    self.layer.at[page, :, :, inside],
                    self.own.written.at[self._ring(step)],
                )
                pl.when(wanted)(copy.start)
                count += wanted.astype(jnp.int32)
        self.own.pending[WRITTEN * self.slots + self._ring(step)] = count

    def _store(self, step: int) -> None:
        """Starts the rows of sequences that are complete towards HBM."""
        count = jnp.int32(0)
        for lane, slot in enumerate(self._slots(step)):
            copy = pltpu.make_async_copy(
                self.own.out[self._ring(step)].at[lane],
                self.hbm.out.at[self._field(slot, SEQ)],
                self.own.stored.at[self._ring(step)],
            )
            last = self._field(slot, LAST)
            pl.when(last > 0)(copy.start)
            count += last
        self.own.pending[STORED * self.slots + self._ring(step)] = count

    # --- waits: of each only the number of bytes counts, which a copy of that size states ------

    def _wait_lines(self, step: int) -> None:
        first = self._slots(step)[0] * LANES
        lines = self.own.lines.at[pl.ds(first, self.lanes * LANES)]
        pltpu.make_async_copy(lines, lines, self.own.lined.at[self._ring(step)]).wait()

    def _wait_rows(self, step: int) -> None:
        for rows in self.own.rows[self._ring(step)]:
            pltpu.make_async_copy(rows, rows, self.own.loaded.at[self._ring(step)]).wait()

    def _wait_fetched(self, step: int) -> None:
        self._wait_rows(step)
        self._wait_pending(FETCHED, step)

    def _wait_pending(self, kind: int, step: int) -> None:
        """Waits for a step's pages to arrive, or for its tiles or rows to have left."""
        count = self.own.pending[kind * self.slots + self._ring(step)]
        some = pl.ds(0, count)
        part, semaphores = {
            FETCHED: (self.layer.at[some], self.own.fetched),
            WRITTEN: (
                self.layer.at[some, :, :, stages.rows_inside(self.shape, jnp.int32(0))],
                self.own.written,
            ),
            STORED: (self.hbm.out.at[some], self.own.stored),
        }[kind]
        copy = pltpu.make_async_copy(part, part, semaphores.at[self._ring(step)])
        pl.when(count > 0)(copy.wait)

    def _clear(self) -> None:
        """No item came before the first: none has anything to wait for."""
        for index in range(NUM_PENDING * self.slots):
            self.own.pending[index] = 0
        for step in (-2, -1):
            for slot in self._slots(step):
                for field in (HI, SEQ, BEHIND, LAST, NEW):
                    self.own.records[slot * RECORD_WORDS + field] = 0


def _kernel(shape: DecodeShape, *refs) -> None:
    """Sorts the references and runs the pipeline, if there is anything to do."""
    given = iter(refs)
    take = lambda wanted: next(given) if wanted else None  # noqa: E731
    scoring = shape.scoring
    scalars = _Scalars(
        next(given), next(given), take(scoring.has_window), take(scoring.has_tree), next(given)
    )
    operands = len(shape.token_rows)
    several = lambda: tuple(next(given) for _ in range(operands))  # noqa: E731
    rows, pages, _ = several(), next(given), next(given)
    sinks = take(scoring.has_sinks)
    out, cache = next(given), next(given)
    per_step = shape.blocks.items_per_step
    own = _Scratch(
        [next(given) for _ in range(shape.num_rings)],
        [next(given) for _ in range(shape.num_rings)],
        [several() for _ in range(shape.blocks.num_slots)],
        [next(given) for _ in range(shape.blocks.num_slots)],
        [stages.Stage(*(next(given) for _ in range(4))) for _ in range(2 * per_step)],
        stages.Running(*(next(given) for _ in range(3))),
        *given,
    )
    kernel = _Kernel(shape, scalars, sinks, _Hbm(rows, pages, out, cache), own)
    pl.when(kernel.num_decodes > 0)(kernel.run)


def _scratch_shapes(shape: DecodeShape) -> list:
    geometry, rows, slots = shape.geometry, shape.num_rows, shape.blocks.num_slots
    lanes, tokens = shape.blocks.items_per_step, shape.blocks.block_tokens
    kv_dtype, f32 = jnp.dtype(geometry.kv_dtype), jnp.float32
    planes, heads, width = geometry.num_planes, geometry.num_kv_heads, geometry.key_width
    kv = pltpu.VMEM((shape.pages, planes, heads, *shape.page_shape), kv_dtype)
    token_rows = [
        pltpu.VMEM((lanes, *shape.grouped(count, width, name)), jnp.dtype(name))
        for count, name in shape.token_rows
    ]
    out = pltpu.VMEM(
        (lanes, *shape.grouped(rows, geometry.value_width, shape.out_dtype)),
        jnp.dtype(shape.out_dtype),
    )
    stage = [
        pltpu.VMEM((rows, tokens), f32),
        pltpu.VMEM((rows, tokens), jnp.dtype(shape.compute_dtype)),
        pltpu.VMEM((rows, LANES), f32),
        pltpu.VMEM((rows, LANES), f32),
    ]
    column = pltpu.VMEM((rows, LANES), f32)
    return [
        *[kv] * shape.num_rings,
        *[pltpu.VMEM((SUBLANES, LANES), jnp.int32)] * shape.num_rings,
        *token_rows * slots,
        *[out] * slots,
        *stage * (2 * lanes),
        *(column, column, pltpu.VMEM((rows, geometry.value_width), f32)),
        pltpu.SMEM((shape.num_rings * RECORD_WORDS,), jnp.int32),
        pltpu.SMEM((shape.num_rings * LANES,), jnp.int32),
        pltpu.SMEM((NUM_PENDING * slots,), jnp.int32),
        *[pltpu.SemaphoreType.DMA((slots,))] * 5,
    ]


def _cost(shape: DecodeShape, num_seqs: int, num_pages: int, table_pages: int) -> pl.CostEstimate:
    """An upper bound: every page of the pool read once, or every entry of the page table."""
    geometry = shape.geometry
    positions = min(num_pages, table_pages) * geometry.page_size
    widths = geometry.key_width + geometry.value_width
    rows = geometry.num_q_heads * shape.blocks.decode_queries
    plane = geometry.num_planes * geometry.num_kv_heads * geometry.key_width
    moved = positions * plane * jnp.dtype(geometry.kv_dtype).itemsize
    moved += num_seqs * rows * widths * jnp.dtype(geometry.q_dtype).itemsize
    return pl.CostEstimate(
        flops=2 * positions * rows * widths,
        transcendentals=positions * rows,
        bytes_accessed=moved,
    )


def _sink_rows(sinks: Float[Array, "N"], shape: DecodeShape) -> Float[Array, "R 128"]:
    """Each row's sink in every lane, in the kernel's row order."""
    geometry, blocks = shape.geometry, shape.blocks
    split = sinks.astype(jnp.float32).reshape(shape.num_tiles, blocks.heads_per_tile, 1, -1)
    rows = (shape.num_tiles, blocks.heads_per_tile, blocks.decode_queries, geometry.group)
    flat = jnp.broadcast_to(split, rows).reshape(shape.num_tiles, -1)
    padded = jnp.pad(flat, ((0, 0), (0, shape.tile_rows - flat.shape[1])))
    return jnp.broadcast_to(padded.reshape(-1, 1), (shape.num_rows, LANES))


def decode_attention(
    q: Float[Array, "T N Hk"],
    k_new: Num[Array, "T K Hk"],
    v_new: Num[Array, "T K Hv"] | None,
    cache: Num[Array, "L P planes K S Hk"],
    work: DecodeWork,
    layer: LayerData,
    *,
    geometry: Geometry,
    scoring: Scoring,
    blocks: DecodeBlocks,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "BQ N Hv"], Array]:
    """Writes the new K/V of the step's decode rows and attends; see `DecodeWork` for the rows.

    Returns `(rows, cache)`: row `i * decode_queries + j` is new token j of the i-th decode row;
    rows beyond those mean nothing. `v_new` is None for latent caches. The cache is updated in
    place: donate it.
    """
    check_geometry(geometry, blocks)
    shape = DecodeShape(geometry, scoring, blocks)
    num_seqs, num_new = work.tokens.shape
    if num_new != blocks.decode_queries:
        raise ValueError(f"work of {num_new} queries per row, blocks for {blocks.decode_queries}")
    scalar = lambda value: jnp.asarray(value, jnp.int32).reshape(1)  # noqa: E731
    prefetched: list[Int[Array, "n"]] = [scalar(layer.layer), scalar(work.num_decodes)]
    if scoring.has_window:
        prefetched.append(scalar(layer.window))
    if scoring.has_tree:
        assert layer.tree is not None
        prefetched.append(jnp.pad(layer.tree[work.tokens], ((0, 1), (0, 0))).reshape(-1))
    prefetched.append(work.seqs)
    rows = token_rows(q, k_new, v_new, work, shape)
    sizes = [shape.grouped(count, geometry.key_width, name) for count, name in shape.token_rows]
    grouped = [x.reshape(-1, *size) for x, size in zip(rows, sizes, strict=True)]
    small = (*grouped, work.pages.reshape(-1))
    # Else XLA may keep a small operand in VMEM, and each of its transfers becomes vector copies.
    operands = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in small]
    pages = cache.reshape(*cache.shape[:4], *shape.page_shape)
    operands.append(pages)
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs = [anywhere] * len(operands)
    aliased = len(prefetched) + len(operands) - 1
    if scoring.has_sinks:
        assert layer.sinks is not None
        operands.append(_sink_rows(layer.sinks, shape))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out_shape = (num_seqs, shape.num_rows, geometry.value_width)
    out = pltpu.HBM(
        (num_seqs, *shape.grouped(*out_shape[1:], shape.out_dtype)), jnp.dtype(shape.out_dtype)
    )
    rows, written = pl.pallas_call(
        partial(_kernel, shape),
        name="paged_decode_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(),
            in_specs=in_specs,
            out_specs=[anywhere, anywhere],
            scratch_shapes=_scratch_shapes(shape),
        ),
        out_shape=[out, jax.ShapeDtypeStruct(pages.shape, cache.dtype)],
        input_output_aliases={aliased: 1},
        cost_estimate=_cost(shape, num_seqs, cache.shape[1], work.pages.size),
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(geometry, scoring, blocks) + VMEM_RESERVE,
        ),
        interpret=interpret,
    )(*prefetched, *operands)
    return output_rows(rows.reshape(out_shape), shape).astype(q.dtype), written.reshape(cache.shape)
