"""Index arithmetic of a packed ragged batch: which sequence, position, page and slot a token has.

Owns the meaning of `cu_q_lens`, `kv_lens` and `page_table`. Computed once per step and shared by
all layers. Knows nothing of scores or values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels.attention.cache_layout import NULL_PAGE


class BatchTables(NamedTuple):
    """The step's tables, as `ragged_paged_attention` takes them."""

    page_table: Int[Array, "B W"]
    kv_lens: Int[Array, "B"]
    cu_q_lens: Int[Array, "B1"]
    num_seqs: Int[Array, ""]


class TokenPlaces(NamedTuple):
    """Where each of the `T` packed tokens belongs; padding tokens point at the null page.

    `firsts` is the position of the first new token of the token's row, `q_lens` how many the row
    has.
    """

    seqs: Int[Array, "T"]
    positions: Int[Array, "T"]
    pages: Int[Array, "T"]
    slots: Int[Array, "T"]
    is_token: Bool[Array, "T"]
    firsts: Int[Array, "T"]
    q_lens: Int[Array, "T"]


def locate_tokens(tables: BatchTables, num_tokens: int, page_size: int) -> TokenPlaces:
    """Locates tokens: row b owns `cu_q_lens[b] .. cu_q_lens[b + 1]`, its last token sits at
    position `kv_lens[b] - 1`."""
    page_table, kv_lens, cu_q_lens, num_seqs = tables
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_token = token < cu_q_lens[num_seqs]
    seqs = jnp.searchsorted(cu_q_lens, token, side="right", method="compare_all") - 1
    seqs = jnp.clip(seqs, 0, kv_lens.shape[0] - 1).astype(jnp.int32)
    q_lens = cu_q_lens[seqs + 1] - cu_q_lens[seqs]
    firsts = kv_lens[seqs] - q_lens
    positions = jnp.where(is_token, firsts + token - cu_q_lens[seqs], 0)
    pages = jnp.where(is_token, page_table[seqs, positions // page_size], NULL_PAGE)
    return TokenPlaces(seqs, positions, pages, positions % page_size, is_token, firsts, q_lens)


def tree_bits(tree: Int[Array, "T"], places: TokenPlaces, decode_queries: int) -> Int[Array, "T"]:
    """The masks that apply: those of short rows; every bit is set where the tree says nothing."""
    return jnp.where(places.q_lens <= decode_queries, tree, -1)


def sees_branch(
    tree: Int[Array, "..."], position: Int[Array, "..."], first: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """True where a position is older than the row's first new token, or a bit of `tree` names it.

    The arrays broadcast; the 32nd bit stands for all later tokens (only -1 reaches that far).
    """
    nth = position - first
    named = jnp.right_shift(tree, jnp.clip(nth, 0, 31)) & 1
    return (nth < 0) | (named == 1)
