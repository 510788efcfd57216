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
one are transfers of nothing and arithmetic on leftovers, so that a step has no branch.

Owns the call, the cursor and the transfers. The arithmetic is in `decode_stages`, the operands'
layout in `decode_work`, the sizes in `decode_blocks`.
"""

from __future__ import annotations

from typing import NamedTuple

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
from kernels.chips import LANES

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
VALID, SEQ, LO, HI, NEW, FIRST, LAST, FIRST_PAGE = range(8)
NUM_PAGES, WRITE_AT, WRITES, WRITE_PAGE = range(8, 12)  # and one more page at 12
SEEN, SEQ_SEEN, BASE, LEFT = range(13, 17)  # of the next item to be fetched into the slot


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


class _Item(NamedTuple):
    """VMEM of one item."""

    kv: Array
    rows: tuple[Array, ...]
    out: Array


class _Scratch(NamedTuple):
    """Everything the kernel allocates. Semaphores have one entry per item in flight."""

    items: list[_Item]
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
        self.interpreted = False
        self.slots, self.lanes = shape.blocks.num_slots, shape.blocks.items_per_step
        self.ahead = self.slots - FILL_STEPS  # steps between an item's fetch and its score
        self.layer, self.num_decodes = scalars.layer[0], scalars.num_decodes[0]
        self.window = None if scalars.window is None else scalars.window[0]

    # --- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Fills the pipeline, runs it until the last item is accumulated, drains it."""
        self._clear()
        cursor = (jnp.int32(0), self._first_position(jnp.int32(0)))
        for step in range(self.slots - 1):
            cursor = self._seek_step(step, cursor)
        for step in range(self.ahead):
            for slot in self._slots(step):
                self._wait_line(slot)
                self._fetch(slot)
            cursor = self._seek_step(step + self.slots - 1, cursor)
        for slot in self._slots(0):
            self._wait_fetched(slot, self._field(slot, VALID), self._field(slot, NUM_PAGES))
            self._write(slot, self._view(slot), self._writes(slot))

        def pending(_: tuple[Array, ...]) -> Array:
            return self._field(self._slots(-2)[0], VALID) > 0

        def lap(cursor: tuple[Array, ...]) -> tuple[Array, ...]:
            for step in range(self.slots):
                cursor = self._step(step, cursor)
            return cursor

        lax.while_loop(pending, lap, cursor)
        for step in range(self.slots):
            # The last lap itself waited for the tiles of the other slots.
            unwaited = step == 0 or step >= self.slots - FILL_STEPS
            for slot in self._slots(step):
                self._wait_sent(slot, written=unwaited, stored=True)
                if step != self.ahead - 1:  # the step fetched last; the others' ids are unused
                    self._wait_line(slot)

    def _step(self, step: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        """One step of every stage; scalars are read first, waits come before any vector work."""
        at = {n: self._slots(step + n) for n in (-2, -1, 0, 1, self.ahead)}
        arriving = [(self._field(s, VALID), self._field(s, NUM_PAGES)) for s in at[1]]
        softmax = [self._view(s) for s in at[-1]]
        ending = [(self._view(s), self._field(s, LAST)) for s in at[-2]]

        for slot, (valid, num_pages) in zip(at[1], arriving, strict=True):
            self._wait_fetched(slot, valid, num_pages)
        for slot in at[self.ahead]:
            self._wait_line(slot)
            self._wait_sent(slot, written=True, stored=False)
        for slot in at[-2]:
            self._wait_sent(slot, written=False, stored=True)

        for slot in at[self.ahead]:
            self._fetch(slot)
        cursor = self._seek_step(step + self.ahead + self.slots - 1, cursor)
        for slot, item in zip(at[-1], softmax, strict=True):
            tree, stage = self.scalars.tree, self._stage(step - 1, slot)
            stages.softmax(self.shape, item, tree, self.window, stage)
        for slot, (item, _) in zip(at[-2], ending, strict=True):
            vmem, stage = self.own.items[slot], self._stage(step - 2, slot)
            stages.accumulate(
                self.shape, item, vmem.kv, stage, self.own.running, self.sinks, vmem.out
            )
        for slot in at[0]:
            vmem, stage = self.own.items[slot], self._stage(step, slot)
            stages.score(self.shape, vmem.rows[0], vmem.kv, stage)
        for slot in at[1]:
            self._write(slot, self._view(slot), self._writes(slot))
        for slot, (item, last) in zip(at[-2], ending, strict=True):
            self.own.pending[2 * slot] = last
            self._store_copy(slot, item.seq, last).start()
        return cursor

    # --- items ------------------------------------------------------------------------------

    def _slots(self, step: int) -> list[int]:
        """The slots of a step's items; an item keeps its slot for everything it owns."""
        first = step % self.slots * self.lanes
        return list(range(first, first + self.lanes))

    def _stage(self, step: int, slot: int) -> stages.Stage:
        return self.own.stages[(step % 2) * self.lanes + slot % self.lanes]

    def _field(self, slot: int, field: int) -> Array:
        return self.own.records[slot * RECORD_WORDS + field]

    def _view(self, slot: int) -> stages.ItemView:
        lo = jnp.int32(0) if self.window is None else self._field(slot, LO)
        hi, new, seq = (self._field(slot, field) for field in (HI, NEW, SEQ))
        return stages.ItemView(lo, hi, new, self._field(slot, FIRST) > 0, seq)

    def _writes(self, slot: int) -> list[tuple[Array, Array, Array]]:
        """The tiles an item writes: (position, 1 or 0, page)."""
        start, count = self._field(slot, WRITE_AT), self._field(slot, WRITES)
        page = self._field(slot, WRITE_PAGE)
        if self.shape.blocks.decode_queries == 1:
            return [(start, count, page)]
        second = jnp.where(count > 1, start + self.shape.write_rows, 0)
        return [
            (start, jnp.minimum(count, 1), page),
            (second, lax.div(count, jnp.int32(2)), self._field(slot, WRITE_PAGE + 1)),
        ]

    def _seq(self, seq: Array, field: int) -> Array:
        return self.scalars.seqs[seq * SEQ_WORDS + field]

    def _first_position(self, seq: Array) -> Array:
        """Start of the first block a sequence reads."""
        if self.window is None:
            return jnp.int32(0)
        block = jnp.int32(self.shape.blocks.block_tokens)
        return lax.div(self._first_seen(self._seq(seq, 0), self._seq(seq, 1)), block) * block

    def _first_seen(self, length: Array, num_new: Array) -> Array:
        """The first position that a sequence's first new token sees."""
        if self.window is None:
            return jnp.int32(0)
        start = jnp.maximum(length - num_new + 1 - self.window, 0)
        return jnp.where(self.window > 0, start, 0)

    def _seek_step(self, step: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        for slot in self._slots(step):
            cursor = self._seek(slot, cursor)
        return cursor

    def _seek(self, slot: int, cursor: tuple[Array, ...]) -> tuple[Array, ...]:
        """Notes the item under the cursor, starts its page ids, moves the cursor on."""
        shape = self.shape
        seq, base = cursor
        seen = (seq < self.num_decodes).astype(jnp.int32)
        current = jnp.minimum(seq, self.num_decodes - 1)
        left = self._seq(current, 0) - base
        last = jnp.where(left <= shape.blocks.block_tokens, seen, 0)
        for field, value in ((SEEN, seen), (SEQ_SEEN, current), (BASE, base), (LEFT, left)):
            self.own.records[slot * RECORD_WORDS + field] = value
        line = lax.div(base, jnp.int32(shape.geometry.page_size * LANES))
        self._line_copy(slot, self._seq(current, 3) + line).start()
        following = self._first_position(jnp.minimum(current + 1, self.num_decodes - 1))
        base = jnp.where(seen > 0, base + shape.blocks.block_tokens, base)
        return seq + last, jnp.where(last > 0, following, base)

    def _record(self, slot: int) -> dict[int, Array]:
        """Works out what the stages need to know of the item that was sought."""
        shape, page = self.shape, jnp.int32(self.shape.geometry.page_size)
        block, rows = shape.blocks.block_tokens, shape.write_rows
        valid, seq, base, left = (
            self._field(slot, field) for field in (SEEN, SEQ_SEEN, BASE, LEFT)
        )
        last = jnp.where(left <= block, valid, 0)
        hi = jnp.minimum(left, block) * valid
        fields = {VALID: valid, SEQ: seq, HI: hi, LAST: last}
        num_pages = lax.div(hi + (page - 1), page)
        if self.window is None:
            fields |= {FIRST: (base == 0).astype(jnp.int32), NUM_PAGES: num_pages}
        else:
            begin = self._first_seen(self._seq(seq, 0), self._seq(seq, 1))
            lo = jnp.maximum(begin - base, 0)
            first_page = lax.div(lo, page)
            fields |= {
                LO: lo,
                FIRST: (begin >= base).astype(jnp.int32),
                FIRST_PAGE: first_page,
                NUM_PAGES: jnp.where(valid > 0, num_pages - first_page, 0),
            }
        if shape.blocks.decode_queries == 1:
            new = jnp.where(last > 0, hi - 1, 0)
            return fields | {NEW: new, WRITE_AT: new & ~(rows - 1), WRITES: last}
        new = left - self._seq(seq, 1)
        start = jnp.maximum(new, 0) & ~(rows - 1)
        writes = hi > jnp.maximum(new, 0)
        tiles = lax.div(hi - 1 - start, jnp.int32(rows)) + 1
        return fields | {
            NEW: new,
            WRITE_AT: jnp.where(writes, start, 0),
            WRITES: jnp.where(writes, tiles, 0),
        }

    # --- transfers: each may be of nothing (count 0) --------------------------------------------

    def _line_copy(self, slot: int, line: Array):
        """Page ids of an item. Of every item, even one past the last: a transfer of nothing still
        has an address, which must be that of a page."""
        return pltpu.make_async_copy(
            self.hbm.pages.at[pl.ds(pl.multiple_of(line * LANES, LANES), LANES)],
            self.own.lines.at[pl.ds(slot * LANES, LANES)],
            self.own.lined.at[slot],
        )

    def _wait_line(self, slot: int) -> None:
        self._line_copy(slot, jnp.int32(0)).wait()

    def _row_copies(self, slot: int, source: Array, count: Array):
        item = self.own.items[slot]
        for row, target in zip(self.hbm.rows, item.rows, strict=True):
            yield pltpu.make_async_copy(
                row.at[pl.ds(source, count)],
                target.at[pl.ds(0, count)],
                self.own.loaded.at[slot],
            )

    def _fetch(self, slot: int) -> None:
        """Starts the pages that hold visible positions, the query and the new rows."""
        shape, page_size = self.shape, self.shape.geometry.page_size
        fields = self._record(slot)
        one_new = shape.blocks.decode_queries == 1
        source = self._seq(fields[SEQ], 2)
        for copy in self._row_copies(slot, source, fields[VALID]):
            copy.start()
        base = self._field(slot, BASE)
        line = lax.div(base, jnp.int32(page_size)) & (LANES - 1)
        ids = [self.own.lines[slot * LANES + line + number] for number in range(shape.pages)]
        count = fields[NUM_PAGES]
        for number, page in enumerate(ids):
            wanted = number < count
            if self.window is not None:
                first = fields[FIRST_PAGE]
                wanted = (number >= first) & (number < first + count)
            num = wanted.astype(jnp.int32)
            pltpu.make_async_copy(
                self.hbm.cache.at[self.layer, pl.ds(page, num)],
                self.own.items[slot].kv.at[pl.ds(number, num)],
                self.own.fetched.at[slot],
            ).start()
        for tile in range(1 if one_new else 2):
            here = lax.div(fields[WRITE_AT] + tile * shape.write_rows, jnp.int32(page_size))
            here = jnp.minimum(here, shape.pages - 1)
            fields[WRITE_PAGE + tile] = self.own.lines[slot * LANES + line + here]
        for field, value in fields.items():
            self.own.records[slot * RECORD_WORDS + field] = value

    def _wait_fetched(self, slot: int, valid: Array, num_pages: Array) -> None:
        for copy in self._row_copies(slot, jnp.int32(0), valid):
            self._wait(copy, valid)
        pages = pltpu.make_async_copy(
            self.hbm.cache.at[self.layer, pl.ds(0, num_pages)],
            self.own.items[slot].kv.at[pl.ds(0, num_pages)],
            self.own.fetched.at[slot],
        )
        self._wait(pages, num_pages)

    def _write(
        self, slot: int, view: stages.ItemView, tiles: list[tuple[Array, Array, Array]]
    ) -> None:
        """Merges the new rows into their tiles and starts the tiles towards the cache."""
        item = self.own.items[slot]
        for start, count, _ in tiles:
            stages.write_tile(self.shape, item.kv, item.rows[-1], view, start, count)
        self.own.pending[2 * slot + 1] = sum(count for _, count, _ in tiles)
        for start, count, page in tiles:
            self._tile_copy(slot, start, count, page).start()

    def _tile_copy(self, slot: int, start: Array, count: Array, page: Array):
        size, rows = self.shape.geometry.page_size, self.shape.write_rows
        here = lax.div(start, jnp.int32(size))
        inside = pl.ds(pl.multiple_of(start & (size - 1), rows), rows)
        return pltpu.make_async_copy(
            self.own.items[slot].kv.at[pl.ds(here, count), :, :, inside, :],
            self.hbm.cache.at[self.layer, pl.ds(page, count), :, :, inside, :],
            self.own.written.at[slot],
        )

    def _store_copy(self, slot: int, seq: Array, count: Array):
        return pltpu.make_async_copy(
            self.own.items[slot].out.at[pl.ds(0, count)],
            self.hbm.out.at[pl.ds(seq, count)],
            self.own.stored.at[slot],
        )

    def _wait_sent(self, slot: int, *, written: bool, stored: bool) -> None:
        """Waits until what a slot last sent has left it."""
        zero = jnp.int32(0)
        if stored:
            count = self.own.pending[2 * slot]
            self._wait(self._store_copy(slot, zero, count), count)
        if written:
            count = self.own.pending[2 * slot + 1]
            self._wait(self._tile_copy(slot, zero, count, zero), count)

    def _wait(self, copy, count: Array) -> None:
        """Waits for a transfer of `count` parts. The interpreter can't wait for nothing."""
        if self.interpreted:
            pl.when(count > 0)(copy.wait)
        else:
            copy.wait()

    def _clear(self) -> None:
        """Nothing is pending; the steps before the first one count as work, so the loop starts."""
        for index in range(2 * self.shape.num_rings):
            self.own.pending[index] = 0
        for step in range(-FILL_STEPS, 0):
            for slot in self._slots(step):
                for field in range(RECORD_WORDS):
                    self.own.records[slot * RECORD_WORDS + field] = 0
                self.own.records[slot * RECORD_WORDS + VALID] = 1


def _kernel(shape: DecodeShape, interpreted: bool, *refs) -> None:
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
        [_Item(next(given), several(), next(given)) for _ in range(shape.num_rings)],
        [stages.Stage(*(next(given) for _ in range(4))) for _ in range(2 * per_step)],
        stages.Running(*(next(given) for _ in range(3))),
        *given,
    )
    kernel = _Kernel(shape, scalars, sinks, _Hbm(rows, pages, out, cache), own)
    kernel.interpreted = interpreted
    pl.when(kernel.num_decodes > 0)(kernel.run)


def _scratch_shapes(shape: DecodeShape) -> list:
    geometry, rows, rings = shape.geometry, shape.num_rows, shape.num_rings
    width, tokens = geometry.key_width, shape.blocks.block_tokens
    kv_dtype, f32 = jnp.dtype(geometry.kv_dtype), jnp.float32
    planes, heads = geometry.num_planes, geometry.num_kv_heads
    item = [
        pltpu.VMEM((shape.pages, planes, heads, geometry.page_size, width), kv_dtype),
        *(pltpu.VMEM((1, count, width), jnp.dtype(name)) for count, name in shape.token_rows),
        pltpu.VMEM((1, rows, geometry.value_width), jnp.dtype(shape.out_dtype)),
    ]
    stage = [
        pltpu.VMEM((rows, tokens), f32),
        pltpu.VMEM((rows, tokens), jnp.dtype(shape.compute_dtype)),
        pltpu.VMEM((rows, LANES), f32),
        pltpu.VMEM((rows, LANES), f32),
    ]
    column = pltpu.VMEM((rows, LANES), f32)
    return [
        *item * rings,
        *stage * (2 * shape.blocks.items_per_step),
        *(column, column, pltpu.VMEM((rows, geometry.value_width), f32)),
        pltpu.SMEM((rings * RECORD_WORDS,), jnp.int32),
        pltpu.SMEM((rings * LANES,), jnp.int32),
        pltpu.SMEM((2 * rings,), jnp.int32),
        pltpu.SemaphoreType.DMA((rings,)),
        pltpu.SemaphoreType.DMA((rings,)),
        pltpu.SemaphoreType.DMA((rings,)),
        pltpu.SemaphoreType.DMA((rings,)),
        pltpu.SemaphoreType.DMA((rings,)),
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
        prefetched.append(layer.tree[work.tokens].reshape(-1))
    prefetched.append(work.seqs)
    small = (*token_rows(q, k_new, v_new, work, shape), work.pages.reshape(-1))
    # Else XLA may keep a small operand in VMEM, and each of its transfers becomes vector copies.
    operands = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in small]
    operands.append(cache)
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs = [anywhere] * len(operands)
    aliased = len(prefetched) + len(operands) - 1
    if scoring.has_sinks:
        assert layer.sinks is not None
        operands.append(_sink_rows(layer.sinks, shape))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out = pltpu.HBM((num_seqs, shape.num_rows, geometry.value_width), jnp.dtype(shape.out_dtype))
    rows, cache = pl.pallas_call(
        lambda *refs: _kernel(shape, bool(interpret), *refs),
        name="paged_decode_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(),
            in_specs=in_specs,
            out_specs=[anywhere, anywhere],
            scratch_shapes=_scratch_shapes(shape),
        ),
        out_shape=[out, jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        input_output_aliases={aliased: 1},
        cost_estimate=_cost(shape, num_seqs, cache.shape[1], work.pages.size),
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(geometry, scoring, blocks) + VMEM_RESERVE,
        ),
        interpret=interpret,
    )(*prefetched, *operands)
    return output_rows(rows, shape).astype(q.dtype), cache
