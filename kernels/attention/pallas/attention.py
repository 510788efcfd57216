"""Both kernels together: which rows each call takes, and one output of the two.

Owns `KernelPlan` (the blocks both are compiled with), the step's work for both, and the merge.
Knows neither kernel's inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.options import LayerData
from kernels.attention.pallas.blocks import chunk_blocks_for, decode_blocks_for
from kernels.attention.pallas.chunk import chunk_attention
from kernels.attention.pallas.chunk_blocks import ChunkBlocks
from kernels.attention.pallas.chunk_work import ChunkWork, chunk_work
from kernels.attention.pallas.decode import decode_attention
from kernels.attention.pallas.decode_blocks import MIN_SLOTS, DecodeBlocks, check_geometry
from kernels.attention.pallas.decode_work import DecodeWork, decode_work
from kernels.attention.pallas.tables import step_tables
from kernels.attention.ragged import BatchTables, TokenPlaces, locate_tokens
from kernels.chips import Chip

# Kernels keep scores in powers of two, where the largest float32 would overflow. A sink of this
# size takes all the weight as well, and its negative (which -inf becomes) none.
LARGEST_SINK = 1e30


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What the kernels of one layer kind are compiled with.

    Attributes:
        geometry: of one device's share of the heads.
        scoring: what a layer asks for; options take memory, so the blocks were chosen with them.
        decode, chunk: block sizes.
    """

    geometry: Geometry
    scoring: Scoring
    decode: DecodeBlocks
    chunk: ChunkBlocks


class PallasWork(NamedTuple):
    """Everything about a step that is the same in all layers.

    `decode_rows` is each token's row in the decode call's result, -1 for tokens of the chunk call.
    """

    places: TokenPlaces
    decode: DecodeWork
    chunk: ChunkWork
    decode_rows: Int[Array, "T"]


def plan_kernels(
    geometry: Geometry,
    scoring: Scoring,
    chip: Chip,
    *,
    decode: DecodeBlocks | None = None,
    chunk: ChunkBlocks | None = None,
    decode_queries: int = 1,
) -> KernelPlan:
    """Chooses blocks: those given, else the chip's tuned ones, else what an estimate suggests.

    Raises `ValueError` where given blocks don't fit the chip; the error proposes some that do.
    """
    decode = decode_blocks_for(
        geometry, scoring, chip, decode_queries=decode_queries, explicit=decode
    )
    check_geometry(geometry, decode)
    chunk = chunk_blocks_for(geometry, scoring, chip, explicit=chunk)
    return KernelPlan(geometry, scoring, decode, chunk)


def small_plan(geometry: Geometry, scoring: Scoring, *, decode_queries: int = 1) -> KernelPlan:
    """The least unrolled kernels: interpreting costs time by the instruction, not by the token."""
    decode = DecodeBlocks(
        block_tokens=max(32, geometry.page_size),
        num_slots=MIN_SLOTS,
        decode_queries=decode_queries,
    )
    check_geometry(geometry, decode)
    chunk = ChunkBlocks(q_tokens=128, kv_block=64, kv_slots=2, band_heads=1, step_bands=1)
    return KernelPlan(geometry, scoring, decode, chunk)


def pallas_work(tables: BatchTables, *, num_tokens: int, plan: KernelPlan) -> PallasWork:
    """Splits the step's rows between the calls and lists the work of each."""
    places = locate_tokens(tables, num_tokens, plan.geometry.page_size)
    queries = plan.decode.decode_queries
    split = step_tables(*tables, decode_queries=queries)
    # Where each batch row stands in the list of decodes: the inverse of that permutation.
    nth = jnp.argsort(split.decode_seqs).astype(jnp.int32)[places.seqs]
    is_decode = places.is_token & (places.q_lens <= queries)
    rows = nth * queries + places.positions - places.firsts
    return PallasWork(
        places,
        decode_work(split, num_tokens=num_tokens, decode_queries=queries),
        chunk_work(split, num_tokens=num_tokens, geometry=plan.geometry, blocks=plan.chunk),
        jnp.where(is_decode, rows, -1),
    )


def pallas_attention(
    q: Float[Array, "T N Wk"],
    k_new: Float[Array, "T R Wk"],
    v_new: Float[Array, "T R Wv"] | None,
    cache: Float[Array, "L P planes R S Wk"],
    data: LayerData,
    work: PallasWork,
    *,
    plan: KernelPlan,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "T N Wv"], Float[Array, "L P planes R S Wk"]]:
    """Runs both calls; each writes its own sequences' keys and values, so neither waits.

    Without chunks nothing is prepared for their call: reordering queries and outputs costs more
    than a short decode.
    """
    if data.sinks is not None:
        data = data._replace(sinks=jnp.clip(data.sinks, -LARGEST_SINK, LARGEST_SINK))
    statics: dict[str, Any] = dict(
        geometry=plan.geometry, scoring=plan.scoring, interpret=interpret
    )
    decoded, cache = decode_attention(
        q, k_new, v_new, cache, work.decode, data, blocks=plan.decode, **statics
    )
    decoded = decoded[jnp.maximum(work.decode_rows, 0)]
    is_decode, is_token = work.decode_rows[:, None, None] >= 0, work.places.is_token[:, None, None]

    def with_chunks(cache: Array) -> tuple[Array, Array]:
        out, cache = chunk_attention(
            q, k_new, v_new, cache, work.chunk, data, blocks=plan.chunk, **statics
        )
        return jnp.where(is_decode, decoded, jnp.where(is_token, out, 0)), cache

    def without(cache: Array) -> tuple[Array, Array]:
        return jnp.where(is_decode, decoded, 0), cache

    return jax.lax.cond(work.chunk.num_items > 0, with_chunks, without, cache)
