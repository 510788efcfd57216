"""The public op of multi-head latent attention (arXiv:2405.04434), in its absorbed form.

All query heads read one shared row per position, `[latent | rope key]`: a score is
`q_latent . latent + q_rope . rope_key`, a value is the latent. The same backends serve it, with one
plane instead of two. Owns the op's contract; the projections around it are the model's.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import checks
from kernels.attention.cache_layout import KvLayout, latent_layout
from kernels.attention.dispatch import AttentionWork, Backend, RunOn, attend
from kernels.attention.lanes import pad_lanes
from kernels.attention.options import LayerData, scoring_of
from kernels.attention.pallas.attention import KernelPlan
from kernels.attention.quantize import scale_heads, to_cache_dtype
from kernels.attention.ragged import BatchTables


def mla_ragged_paged_attention(
    q_latent: Float[Array, "T N R"],
    q_rope: Float[Array, "T N E"],
    kv_new: Float[Array, "T R"],
    k_rope_new: Float[Array, "T E"],
    cache: Float[Array, "L P 1 1 S width"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
    window: Int[Array, ""] | None = None,
    sinks: Float[Array, "N"] | None = None,
    tree: Int[Array, "T"] | None = None,
    kv_scale: Float[Array, ""] | None = None,
    k_rope_scale: Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    decode_queries: int = 1,
    layout: KvLayout | None = None,
    backend: Backend = "xla",
    kernels: KernelPlan | None = None,
    work: AttentionWork | None = None,
) -> tuple[Float[Array, "T N R"], Float[Array, "L P 1 1 S width"]]:
    """`ragged_paged_attention` over latent rows: same batch, same options, same errors.

    Args:
        q_latent: queries through the absorbed key projection, `[T, N, R]`.
        q_rope: the rotated part of the queries, `[T, N, E]`.
        kv_new, k_rope_new: the new latents `[T, R]` and rotated keys `[T, E]`.
        cache: as `layout` says; donate it, it is returned.
        scale: factor on the scores; stated by the caller, because the head size it comes from is
            not to be seen in absorbed queries.
        kv_scale, k_rope_scale: float32 scalars, positive, of an 8-bit cache's latents and keys.
        layout: how the cache lies; None: `[L, P, 1, 1, S, R + E]`.

    The other arguments are those of `ragged_paged_attention`.

    Returns:
        `(out [T, N, R] in the dtype of q_latent, cache)`: weighted sums of latents.
    """
    data = LayerData(layer, window, sinks, tree)
    tables = BatchTables(page_table, kv_lens, cu_q_lens, num_seqs)
    named = {"q_latent": q_latent, "q_rope": q_rope, "kv_new": kv_new, "k_rope_new": k_rope_new}
    ranks = dict(zip(named, (3, 3, 2, 2), strict=True)) | {"cache": 6}
    checks.check_ranks({name: (named.get(name, cache), rank) for name, rank in ranks.items()})
    _check_widths(q_latent, q_rope, kv_new, k_rope_new)
    num_tokens, num_heads, latent_dim = q_latent.shape
    if layout is None:
        layout = latent_layout(
            latent_dim=latent_dim,
            rope_dim=q_rope.shape[2],
            page_size=cache.shape[4],
            dtype=str(cache.dtype),
        )
    if layout.planes != 1 or layout.head_dim != latent_dim + q_rope.shape[2]:
        raise ValueError(
            f"latents of {latent_dim} and rope keys of {q_rope.shape[2]} need a latent_layout of "
            f"{latent_dim + q_rope.shape[2]}, got {layout}"
        )
    checks.check_queries(named)
    checks.check_cache(cache, layout)
    checks.check_tables(tables, data)
    checks.check_layer_data(data, num_tokens, num_heads, decode_queries)
    checks.check_scales({"kv_scale": kv_scale, "k_rope_scale": k_rope_scale}, layout.dtype, ())

    def rows(x: Array, scale: Array | None) -> Array:
        return to_cache_dtype(x[:, None], cache.dtype, None if scale is None else scale[None])

    def queries(q: Array, scale: Array | None) -> Array:
        return scale_heads(q, None if scale is None else scale[None])

    new = jnp.concatenate([rows(kv_new, kv_scale), rows(k_rope_new, k_rope_scale)], axis=2)
    q = jnp.concatenate([queries(q_latent, kv_scale), queries(q_rope, k_rope_scale)], axis=2)
    out, cache = attend(
        pad_lanes(q, layout.width),
        pad_lanes(new, layout.width),
        None,
        cache,
        data,
        tables,
        work,
        layout=layout,
        scoring=scoring_of(data, scale, soft_cap),
        run=RunOn(backend, str(q_latent.dtype), decode_queries, kernels),
    )
    return queries(out[..., :latent_dim], kv_scale).astype(q_latent.dtype), cache


def _check_widths(q_latent: Array, q_rope: Array, kv_new: Array, k_rope_new: Array) -> None:
    if q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(
            f"q_latent and q_rope must agree in [T, N], got {q_latent.shape} and {q_rope.shape}"
        )
    right = ((q_latent.shape[0], q_latent.shape[2]), (q_latent.shape[0], q_rope.shape[2]))
    if (kv_new.shape, k_rope_new.shape) != right:
        raise ValueError(
            f"kv_new and k_rope_new must be [T, R] = {right[0]} and [T, E] = {right[1]}, "
            f"got {kv_new.shape} and {k_rope_new.shape}"
        )
