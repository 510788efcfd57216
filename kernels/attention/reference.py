"""The plain-JAX definition of ragged paged attention: what "correct" means for every backend.

Written to be read, not to be fast: it gathers every position of every sequence's page table.
Knows nothing of blocks, chips or compiled shapes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.attention.cache_layout import read_kv_block, write_kv
from kernels.attention.geometry import Scoring
from kernels.attention.options import LayerData
from kernels.attention.ragged import (
    BatchTables,
    TokenPlaces,
    locate_tokens,
    sees_branch,
    tree_bits,
)


def reference_attention(
    q: Float[Array, "T N Hk"],
    k_new: Array,
    v_new: Array | None,
    cache: Array,
    data: LayerData,
    tables: BatchTables,
    *,
    scoring: Scoring,
    value_width: int,
    decode_queries: int,
) -> tuple[Float[Array, "T N Hv"], Array]:
    """Writes the new K/V, then lets every query attend to the positions it sees.

    Takes rows as they lie in the cache, in its dtype. See `kernels.attention.dispatch.attend`.
    """
    num_tokens, num_heads, width = q.shape
    num_kv_heads, page_size = cache.shape[3], cache.shape[4]
    where = locate_tokens(tables, num_tokens, page_size)
    cache = write_kv(cache, data.layer, k_new, v_new, where.pages, where.slots)

    pages = tables.page_table[where.seqs]
    keys, values = read_kv_block(cache, data.layer, pages, value_width)  # [T, K, W*S, Hk or Hv]
    visible = _visible(where, data, jnp.arange(keys.shape[2]), decode_queries)

    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, width)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "tkgh,tksh->tkgs",
        grouped.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=highest,
    )
    scores *= scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    weights = _softmax(scores, data.sinks)
    # Selected, not multiplied by 0: slots nobody owns may hold NaN.
    masked_values = jnp.where(visible[:, None, :, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("tkgs,tksh->tkgh", weights, masked_values, precision=highest)
    return out.reshape(num_tokens, num_heads, value_width), cache


def _visible(
    where: TokenPlaces, data: LayerData, positions: Int[Array, "X"], decode_queries: int
) -> Bool[Array, "T X"]:
    """Which positions each token's query sees; a padding token sees none."""
    own = where.positions[:, None]
    visible = where.is_token[:, None] & (positions <= own)
    if data.window is not None:
        visible &= (data.window <= 0) | (positions > own - data.window)
    if data.tree is not None:
        bits = tree_bits(data.tree, where, decode_queries)
        visible &= sees_branch(bits[:, None], positions, where.firsts[:, None])
    return visible


def _softmax(
    scores: Float[Array, "T K G X"], sinks: Float[Array, "N"] | None
) -> Float[Array, "T K G X"]:
    """Weights of each row; a sink takes its share of the sum but has no value."""
    lowest = float(jnp.finfo(jnp.float32).min)  # finite: a row that sees nothing stays free of NaN
    sink = jnp.full(scores.shape[1:3], -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(scores.shape[1:3])
    sink = sink[..., None]
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=lowest), sink)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    return weights / jnp.maximum(total, 1e-30)
