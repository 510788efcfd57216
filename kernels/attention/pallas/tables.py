"""What both kernels need to know of a step, computed once outside the kernels for all layers.

Owns the split of a step's rows: rows of at most `decode_queries` new tokens go to the decode call,
longer ones to the chunk call. Every sequence belongs to exactly one call, so neither waits for the
other's writes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.attention.options import LayerData as LayerData


class StepTables(NamedTuple):
    """The step's tables, and its rows split by call.

    `decode_seqs[:num_decodes]` and `chunk_seqs[:num_chunks]` are ascending row numbers; the
    entries past the counts are the other rows, so that each list is a permutation of all.
    """

    page_table: Int[Array, "B W"]
    kv_lens: Int[Array, "B"]
    cu_q_lens: Int[Array, "B1"]
    decode_seqs: Int[Array, "B"]
    num_decodes: Int[Array, ""]
    chunk_seqs: Int[Array, "B"]
    num_chunks: Int[Array, ""]


def step_tables(
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    decode_queries: int,
) -> StepTables:
    """Splits the rows; the arrays are those of `ragged_paged_attention`."""
    num_rows = kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    used = (row < num_seqs) & (q_lens > 0)
    is_decode = used & (q_lens <= decode_queries)
    is_chunk = used & (q_lens > decode_queries)

    def compact(member: Array) -> tuple[Array, Array]:
        return jnp.argsort(~member, stable=True).astype(jnp.int32), jnp.sum(member, dtype=jnp.int32)

    return StepTables(page_table, kv_lens, cu_q_lens, *compact(is_decode), *compact(is_chunk))
