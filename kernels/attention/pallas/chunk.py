"""Chunked paged attention on a TPU: the rows of a step with more than a few new tokens.

Owns the kernel's loop and its entry point. One call per layer reads the context from pages and the
new keys and values from their packed tokens, so nothing in it waits for the new tokens' pages,
which it fills beside the arithmetic. Rows of few tokens belong to the decode kernel.

    item        = one query block of one sequence          chunk_work
    KV block    = context pages, then packed new tokens    chunk_copies
    step        = a few bands of heads x one KV block      chunk_step

                  step n             step n+1           step n+2
    matrix unit   K Q^T (n)          K Q^T (n+1)        K Q^T (n+2)
                  V^T P^T (n-1)      V^T P^T (n)        V^T P^T (n+1)
    vector unit   softmax (n-1)      softmax (n)        softmax (n+1)
    copies        KV blocks n+1 ... n+slots-1, queries of the next item, pages of the last one

Steps run across blocks and items without a break; one more step than there is work finishes the
last one. The mask is rewritten only where it changes: blocks that every query sees entirely share
one that hides nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import chunk_copies as copies
from kernels.attention.pallas import chunk_step as steps
from kernels.attention.pallas.chunk_blocks import (
    IDS_PER_WINDOW,
    ChunkBlocks,
    candidate_blocks,
    check_blocks,
    default_blocks,
    itemsize,
    num_bands,
    row_tile,
    smem_bytes,
    vmem_buffers,
    vmem_bytes,
    vmem_limit,
)
from kernels.attention.pallas.chunk_work import ChunkWork, Item, chunk_work
from kernels.attention.pallas.tables import LayerData

__all__ = [
    "ChunkBlocks",
    "ChunkWork",
    "candidate_blocks",
    "check_blocks",
    "chunk_attention",
    "chunk_work",
    "default_blocks",
    "smem_bytes",
    "vmem_bytes",
]


def chunk_attention(
    q: Float[Array, "T N Hk"],
    k_new: Float[Array, "T K Hk"],
    v_new: Float[Array, "T K Hv"] | None,
    cache: Float[Array, "L P planes K S Hk"],
    work: ChunkWork,
    layer: LayerData,
    *,
    geometry: Geometry,
    scoring: Scoring,
    blocks: ChunkBlocks,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "L P planes K S Hk"]]:
    """Attends the chunk rows of `work` and writes their K and V into their pages.

    Rows of the output that belong to other sequences or to padding hold anything. Tree masks are
    for rows of a few tokens: here every row is causal.
    """
    num_tokens, tile = q.shape[0], row_tile(geometry)
    most = -(-num_tokens // tile) * tile
    factor = steps.query_factor(scoring.scale, scoring.soft_cap)
    queries = (q.astype(jnp.float32) * factor).astype(q.dtype).swapaxes(0, 1)
    queries = jnp.pad(queries, ((0, 0), (0, most + blocks.q_tokens - num_tokens), (0, 0)))
    new = k_new[None] if v_new is None else jnp.stack([k_new, v_new])
    behind = most + max(blocks.q_tokens, blocks.kv_block) - num_tokens
    new = jnp.pad(new.swapaxes(1, 2), ((0, 0), (0, 0), (tile, behind), (0, 0)))

    window = jnp.int32(0) if layer.window is None else layer.window
    scalars = jnp.stack([work.num_items, layer.layer, window]).astype(jnp.int32)
    tables = (work.item_seqs, work.item_blocks, work.cu_q_lens, work.kv_lens)
    prefetched = (scalars, *tables, work.first_pages, work.last_pages)
    operands = [queries, new, work.page_ids, cache]
    if not interpret:
        # XLA may keep a small operand in VMEM, from where "copies" are loops of loads and stores.
        operands = [pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in operands]
    in_specs = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(operands)
    if scoring.has_sinks:
        assert layer.sinks is not None
        bands = num_bands(geometry, blocks)
        columns = jnp.repeat(layer.sinks.astype(jnp.float32) * steps.LOG2_E, blocks.q_tokens)
        operands.append(columns.reshape(bands, 1, blocks.columns))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))

    value_shape = (geometry.num_q_heads, queries.shape[1], geometry.value_width)
    out, cache = pl.pallas_call(
        functools.partial(_kernel, geometry=geometry, scoring=scoring, blocks=blocks),
        out_shape=(
            jax.ShapeDtypeStruct(value_shape, q.dtype)
            if interpret
            else pltpu.HBM(value_shape, q.dtype),
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            scratch_shapes=_scratch(geometry, blocks),
        ),
        input_output_aliases={len(prefetched) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, vmem_limit_bytes=vmem_limit(geometry, scoring, blocks)
        ),
        cost_estimate=_cost(q, cache, work, geometry),
        interpret=interpret,
        name="chunk_attention",
    )(*prefetched, *operands)
    return out[:, :num_tokens].swapaxes(0, 1), cache


def _scratch(geometry: Geometry, blocks: ChunkBlocks) -> list[Any]:
    buffers = vmem_buffers(geometry, blocks).values()
    dma = pltpu.SemaphoreType.DMA
    return [
        *(pltpu.VMEM(shape, jnp.dtype(dtype)) for shape, dtype in buffers),
        pltpu.SMEM((1, IDS_PER_WINDOW), jnp.int32),
        pltpu.SMEM((2, 1, IDS_PER_WINDOW), jnp.int32),
        pltpu.SMEM((copies.CURSOR_WORDS,), jnp.int32),
        pltpu.SMEM((blocks.kv_slots, 8), jnp.int32),
        *(dma((count,)) for count in (blocks.kv_slots, 2, 2)),
        *(dma(()) for _ in range(5)),
    ]


def _cost(
    q: Float[Array, "T N Hk"],
    cache: Float[Array, "L P planes K S Hk"],
    work: ChunkWork,
    geometry: Geometry,
) -> pl.CostEstimate:
    """Of a step whose every token sees as many positions as the page table holds, at most 8k."""
    seqs = work.kv_lens.shape[0]
    context = min(work.page_ids.shape[0] * IDS_PER_WINDOW * geometry.page_size // seqs, 8192)
    pairs = q.shape[0] * q.shape[1] * context
    position = (
        geometry.num_planes * geometry.num_kv_heads * geometry.key_width * cache.dtype.itemsize
    )
    return pl.CostEstimate(
        flops=2 * pairs * (geometry.key_width + geometry.value_width),
        bytes_accessed=2 * q.size * itemsize(geometry.q_dtype) + context * position,
        transcendentals=pairs,
    )


def _kernel(*refs: Any, geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks) -> None:
    mem = _name_refs(list(refs), geometry, scoring, blocks)
    pl.when(mem.work.num_items > 0)(lambda: _run(mem))


def _name_refs(
    refs: list[Any], geometry: Geometry, scoring: Scoring, blocks: ChunkBlocks
) -> copies.Memory:
    take = lambda n: [refs.pop(0) for _ in range(n)]  # noqa: E731
    scalars, seqs, item_blocks, cu_q_lens, kv_lens, first_pages, last_pages = take(7)
    hbm_q, hbm_new, page_ids, _ = take(4)
    sinks = refs.pop(0) if scoring.has_sinks else None
    hbm_out, cache = take(2)
    names = list(vmem_buffers(geometry, blocks))
    vmem = dict(zip(names, take(len(names)), strict=True))
    ids, tile_ids, cursor, ring = take(4)
    sem_names = ("kv", "q", "edges", "ids", "out", "fresh", "tile_ids", "tiles")
    return copies.Memory(
        geometry=geometry,
        scoring=scoring,
        blocks=blocks,
        work=ChunkWork(
            seqs,
            item_blocks,
            scalars[0],
            cu_q_lens,
            kv_lens,
            first_pages,
            last_pages,
            page_ids,
        ),
        layer=scalars[1],
        window=scalars[2],
        hbm_q=hbm_q,
        hbm_new=hbm_new,
        hbm_out=hbm_out,
        cache=cache,
        sinks=sinks,
        vmem=vmem,
        ids=ids,
        tile_ids=tile_ids,
        cursor=cursor,
        ring=ring,
        sems=dict(zip(sem_names, refs, strict=True)),
    )


def _run(mem: copies.Memory) -> None:
    _begin(mem)
    num_items = mem.work.num_items

    def run_item(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        real = index < num_items
        item = mem.item(jnp.minimum(index, num_items - 1))
        pl.when(real)(lambda: _begin_item(mem, index, item))
        run_block = functools.partial(_run_block, mem, index)
        state = lax.fori_loop(0, jnp.where(real, item.num_blocks, 1), run_block, state)
        pl.when(real & item.is_last)(lambda: copies.send_held(mem, item))
        return state

    # The last round is there for its first step, which finishes the item before.
    lax.fori_loop(0, num_items + 1, run_item, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
    last = num_items - 1
    copies.output_copy(mem, mem.item(last), last & 1).wait()


def _begin(mem: copies.Memory) -> None:
    """Fills the pipe: page ids, queries and KV blocks of the first items."""
    for word in range(copies.ITEM_WORDS):
        mem.cursor[word] = -1 if word == copies.IDS_ROW else 0
    mem.cursor[copies.HIDING] = 1
    copies.query_copy(mem, mem.item(0), 0).start()
    copies.put_cursor(mem, 0)
    copies.start_ids(mem)

    @pl.loop(0, mem.blocks.kv_slots - 1)
    def _(_: Any) -> None:
        copies.wait_for_ids(mem)
        copies.start_whole(mem, 0, 1)
        copies.advance(mem)


def _begin_item(mem: copies.Memory, index: Any, item: Item) -> None:
    copies.start_fresh(mem, item)
    copies.query_copy(mem, item, index & 1).wait()

    @pl.when(index + 1 < mem.work.num_items)
    def _() -> None:
        copies.query_copy(mem, mem.item(index + 1), (index + 1) & 1).start()


def _run_block(
    mem: copies.Memory, index: Any, nth: Any, state: tuple[Any, Any, Any]
) -> tuple[Any, Any, Any]:
    """All steps of one KV block; `state` is (slot, slot and group of the step before)."""
    slot = state[0]
    real = index < mem.work.num_items
    pl.when(real)(lambda: _prepare_block(mem, slot))

    groups = num_bands(mem.geometry, mem.blocks) // mem.blocks.step_bands

    def run_step(group: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        steps.step(mem, before, (slot, group), index & 1)
        # The slot of the block before is free now. In the step's own stretch of code: its last
        # results take long to come, and nothing else is left to do.
        copies.start_whole(mem, group, groups)
        pl.when((nth == 0) & (group == 0))(lambda: _turn_over(mem, index))
        return slot, group

    if groups == 1:
        run_step(0, state[1:])
        before = (slot, jnp.int32(0))
    else:
        before = lax.fori_loop(0, jnp.where(real, groups, 1), run_step, state[1:])
    copies.advance(mem)
    return (jnp.where(slot + 1 == mem.blocks.kv_slots, 0, slot + 1), *before)


def _prepare_block(mem: copies.Memory, slot: Any) -> None:
    """Waits for a block, and clears and hides what no query may see."""
    ring, cursor = mem.ring, mem.cursor
    copies.wait_for_ids(mem)
    copies.wait_for_block(mem, slot)

    @pl.when((ring[slot, copies.PLAIN] == 0) | (cursor[copies.HIDING] == 1))
    def _() -> None:
        cursor[copies.HIDING] = ring[slot, copies.MASKED]
        steps.mark_seen(mem, slot)

        @pl.when((ring[slot, copies.LOW] > 0) | (ring[slot, copies.HIGH] < mem.blocks.kv_block))
        def _() -> None:
            if mem.geometry.kv_dtype != "int8":  # which has no NaN
                steps.clear_rows(mem, slot)


def _turn_over(mem: copies.Memory, index: Any) -> None:
    """Finishes the item before, empties the bands for this one, and writes the new K and V of this.

    What is finished before the first item is nobody's, and not sent; what is turned after the last
    one isn't either.
    """
    before = jnp.maximum(index - 1, 0)
    parity, bands = before & 1, num_bands(mem.geometry, mem.blocks)
    real = index < mem.work.num_items
    item = mem.item(jnp.minimum(index, mem.work.num_items - 1))
    pl.when(real)(lambda: copies.wait_for_fresh(mem, item))
    copies.wait_for_tiles(mem)

    @pl.loop(0, bands)
    def _(band: Any) -> None:
        # Side by side: one is bound by stores and the cross-lane units, the other by arithmetic.
        steps.finish(mem, band, parity)
        copies.turn_fresh(mem, item, band, bands)

    pl.when(real)(lambda: copies.write_fresh(mem, item))
    pl.when(index > 0)(lambda: _send_output(mem, before))


def _send_output(mem: copies.Memory, index: Any) -> None:
    """Sends a finished item, after what the item before it sent has arrived."""
    item, parity = mem.item(index), index & 1

    @pl.when(index > 0)
    def _() -> None:
        older = mem.item(index - 1)
        copies.output_copy(mem, older, 1 - parity).wait()
        pl.when(item.q_start < item.first)(lambda: _keep_neighbour(mem, item, older, parity))

    copies.output_copy(mem, item, parity).start()


def _keep_neighbour(mem: copies.Memory, item: Item, older: Item, parity: Any) -> None:
    """Copies what the item before the border wrote into the tile that both share."""
    offset, tile, out = item.q_start - older.q_start, mem.tile, mem.vmem["out"]

    @pl.when(offset < mem.blocks.q_tokens)
    def _() -> None:
        shared = pl.ds(pl.multiple_of(offset, tile), tile)
        theirs = out[1 - parity, :, shared, :].astype(jnp.float32)
        ours = out[parity, :, :tile, :].astype(jnp.float32)
        token = item.q_start + lax.broadcasted_iota(jnp.int32, ours.shape, 1)
        merged = jnp.where(token < item.first, theirs, ours)
        out[parity, :, :tile, :] = merged.astype(out.dtype)
