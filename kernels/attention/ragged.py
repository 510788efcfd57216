"""Index arithmetic of a packed ragged batch: which sequence, position, page and slot a token has.

Owns the meaning of `cu_q_lens`, `kv_lens` and `page_table`. Computed once per step and shared by
all layers. Knows nothing of scores or values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels.attention.cache_layout import NULL_PAGE


class TokenPlaces(NamedTuple):
    """Where each of the `T` packed tokens belongs; padding tokens point at the null page."""

    seqs: Int[Array, "T"]
    positions: Int[Array, "T"]
    pages: Int[Array, "T"]
    slots: Int[Array, "T"]
    is_token: Bool[Array, "T"]


def locate_tokens(
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    num_tokens: int,
    page_size: int,
) -> TokenPlaces:
    """Locates tokens: row b owns `cu_q_lens[b] .. cu_q_lens[b + 1]`, its last token sits at
    position `kv_lens[b] - 1`."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_token = token < cu_q_lens[num_seqs]
    seqs = jnp.searchsorted(cu_q_lens, token, side="right", method="compare_all") - 1
    seqs = jnp.clip(seqs, 0, kv_lens.shape[0] - 1).astype(jnp.int32)
    positions = kv_lens[seqs] - cu_q_lens[seqs + 1] + token
    positions = jnp.where(is_token, positions, 0)
    pages = jnp.where(is_token, page_table[seqs, positions // page_size], NULL_PAGE)
    return TokenPlaces(seqs, positions, pages, positions % page_size, is_token)
