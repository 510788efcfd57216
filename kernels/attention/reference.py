"""The plain-JAX definition of ragged paged attention: what "correct" means for every backend.

Written to be read, not to be fast: it gathers every position of every sequence's page table.
Knows nothing of blocks, chips or compiled shapes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention.cache_layout import read_kv_block, write_kv
from kernels.attention.ragged import locate_tokens


def reference_attention(
    q: Float[Array, "T N H"],
    k_new: Float[Array, "T K H"],
    v_new: Float[Array, "T K H"],
    cache: Float[Array, "L P 2 K S H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K S H"]]:
    """Writes the new K/V, then lets every query attend to positions `0 .. its own`.

    See `kernels.attention.ragged_paged_attention` for the contract.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = cache.shape[3], cache.shape[4]
    where = locate_tokens(page_table, kv_lens, cu_q_lens, num_seqs, num_tokens, page_size)
    cache = write_kv(cache, layer, k_new, v_new, where.pages, where.slots)

    keys, values = read_kv_block(cache, layer, page_table[where.seqs])  # [T, K, W*S, H]
    visible = jnp.arange(keys.shape[2])[None, :] <= where.positions[:, None]  # [T, W*S]
    visible &= where.is_token[:, None]

    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "tkgh,tksh->tkgs",
        grouped.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=highest,
    )
    scores = jnp.where(visible[:, None, None, :], scores * scale, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    masked_values = jnp.where(visible[:, None, :, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("tkgs,tksh->tkgh", weights, masked_values, precision=highest)
    return out.reshape(q.shape).astype(q.dtype), cache
