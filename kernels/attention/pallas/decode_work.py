"""What the decode call needs of a step, and how its operands are laid out.

Owns `DecodeWork` (computed once per step for all layers) and the reordering of query, new K/V and
output rows between the model's layout and the kernel's tiles. Knows nothing of items or buffers:
the kernel walks sequences and blocks with a cursor of its own, so nothing here grows with context.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from kernels.attention.pallas.decode_blocks import DecodeShape
from kernels.attention.pallas.tables import StepTables
from kernels.chips import LANES

SEQ_WORDS = 4  # per sequence in `DecodeWork.seqs`: length, new tokens, operand row, first page row


class DecodeWork(NamedTuple):
    """One step's decode rows; the i-th is sequence `decode_seqs[i]`.

    Attributes:
        num_decodes: how many there are; entries past it mean nothing.
        seqs: per row its KV length, number of new tokens, its row in the operands that
            `token_rows` makes, and first row of `pages`; zeros behind the last decode, of which
            there is at least one row.
        pages: the page table in rows of 128 ids, so that a row is one aligned transfer.
        tokens: token number of each new token, clipped into the step.
    """

    num_decodes: Int[Array, ""]
    seqs: Int[Array, "W"]
    pages: Int[Array, "X 1 128"]
    tokens: Int[Array, "B Q"]


def decode_work(tables: StepTables, *, num_tokens: int, decode_queries: int) -> DecodeWork:
    """Gathers the decode rows of a step of `num_tokens` packed tokens."""
    num_rows, width = tables.page_table.shape
    lines = -(-width // LANES)
    padded = jnp.pad(tables.page_table, ((0, 0), (0, lines * LANES - width)))
    seqs = tables.decode_seqs
    first = tables.cu_q_lens[seqs]
    nth = jnp.arange(num_rows, dtype=jnp.int32)
    rows = first if _rows_are_tokens(num_tokens, num_rows, decode_queries) else nth
    fields = (tables.kv_lens[seqs], tables.cu_q_lens[seqs + 1] - first, rows, seqs * lines)
    words = jnp.stack(fields, axis=1).astype(jnp.int32)
    words = jnp.where((nth < tables.num_decodes)[:, None], words, 0)
    tokens = first[:, None] + jnp.arange(decode_queries, dtype=jnp.int32)[None, :]
    return DecodeWork(
        tables.num_decodes,
        jnp.pad(words, ((0, 1), (0, 0))).reshape(-1),
        padded.reshape(num_rows * lines, 1, LANES),
        jnp.minimum(tokens, num_tokens - 1),
    )


def _rows_are_tokens(num_tokens: int, num_seqs: int, decode_queries: int) -> bool:
    """Whether operands have a row per token, or one per decode row, gathered.

    A plain decode step is about as many tokens as rows: then reordering them all is cheaper.
    """
    return decode_queries == 1 and num_tokens <= num_seqs


def token_rows(
    q: Float[Array, "T N Hk"],
    k_new: Num[Array, "T K Hk"],
    v_new: Num[Array, "T K Hk"] | None,
    work: DecodeWork,
    shape: DecodeShape,
) -> tuple[Num[Array, "X R Hk"], ...]:
    """What each sequence brings, as `DecodeShape.token_rows` says: queries, then new K/V."""
    planes = k_new if v_new is None else jnp.concatenate([k_new, v_new], axis=1)
    if _rows_are_tokens(q.shape[0], *work.tokens.shape):
        q, planes = q[:, None], planes[:, None]
    else:
        q, planes = q[work.tokens], planes[work.tokens]
    queries = _query_rows(q, shape)
    new = planes.reshape(planes.shape[0], shape.new_rows, -1)
    if len(shape.token_rows) == 2:
        return queries, _repeated_in_words(new, shape.packing)
    rows = jnp.concatenate([queries, new], axis=1)
    return (jnp.pad(rows, ((0, 0), (0, shape.token_rows[0][0] - rows.shape[1]), (0, 0))),)


def _query_rows(queries: Float[Array, "X Q N Hk"], shape: DecodeShape) -> Float[Array, "X R Hk"]:
    """Queries in the kernel's order: tile, KV head of the tile, new token, head of the group."""
    geometry, blocks = shape.geometry, shape.blocks
    tiles, heads = shape.num_tiles, blocks.heads_per_tile
    count, num_new, _, width = queries.shape
    split = queries.reshape(count, num_new, tiles, heads, geometry.group, width)
    ordered = split.transpose(0, 2, 3, 1, 4, 5).reshape(count, tiles, -1, width)
    padding = shape.tile_rows - ordered.shape[2]
    if padding:
        ordered = jnp.pad(ordered, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return ordered.reshape(count, shape.num_rows, width)


def output_rows(rows: Float[Array, "B R Hv"], shape: DecodeShape) -> Float[Array, "BQ N Hv"]:
    """The inverse of `_query_rows` for the kernel's output."""
    geometry, blocks = shape.geometry, shape.blocks
    tiles, heads, num_new = shape.num_tiles, blocks.heads_per_tile, blocks.decode_queries
    count, _, width = rows.shape
    used = heads * shape.rows_per_head
    dense = rows.reshape(count, tiles, shape.tile_rows, width)[:, :, :used]
    split = dense.reshape(count, tiles, heads, num_new, geometry.group, width)
    return split.transpose(0, 3, 1, 2, 4, 5).reshape(count * num_new, geometry.num_q_heads, width)


def _repeated_in_words(rows: Num[Array, "X R Hk"], packing: int) -> Int[Array, "X R Hk"]:
    """Narrow rows as 32-bit words that hold the value once per cache row sharing the word.

    The kernel merges a word under a mask of bits, whatever the row's place in it: narrow types
    need no shifting between rows.
    """
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{32 // packing}"))
    repeated = {1: 1, 2: 0x0001_0001, 4: 0x0101_0101}[packing]
    return (bits.astype(jnp.uint32) * jnp.uint32(repeated)).astype(jnp.int32)
