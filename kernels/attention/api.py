"""The public attention op: checks at trace time, scales and lanes, then the backend.

Owns the op's contract. Scales and the packing of narrow heads are done here, for every backend.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels.attention import checks
from kernels.attention.cache_layout import KvLayout, kv_layout
from kernels.attention.dispatch import AttentionWork, Backend, RunOn, attend
from kernels.attention.lanes import pack_kv, pack_queries, unpack_output
from kernels.attention.options import LayerData, scoring_of
from kernels.attention.pallas.attention import KernelPlan
from kernels.attention.quantize import scale_heads, to_cache_dtype
from kernels.attention.ragged import BatchTables


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k_new: Float[Array, "T K H"],
    v_new: Float[Array, "T K H"],
    cache: Float[Array, "L P planes R S width"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    window: Int[Array, ""] | None = None,
    sinks: Float[Array, "N"] | None = None,
    tree: Int[Array, "T"] | None = None,
    k_scale: Float[Array, "K"] | None = None,
    v_scale: Float[Array, "K"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    decode_queries: int = 1,
    layout: KvLayout | None = None,
    backend: Backend = "xla",
    kernels: KernelPlan | None = None,
    work: AttentionWork | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P planes R S width"]]:
    """Causal attention of a packed ragged batch of chunks and decodes over a paged KV cache.

    Row b (b < `num_seqs`) owns the packed tokens `cu_q_lens[b] .. cu_q_lens[b + 1]`; they are the
    last of its `kv_lens[b]` positions. Their K and V are written into the pages of `page_table`
    (once each, before any query reads them), then every query attends to the positions up to and
    including its own. Padding tokens (at and after `cu_q_lens[num_seqs]`) yield zeros.

    Args:
        q, k_new, v_new: queries `[T, N, H]`, new keys and values `[T, K, H]`; N is a multiple of K.
        cache: as `layout` says; donate it, it is returned.
        layer: scalar int32, the layer of `cache` to write and read.
        page_table: `[B, W]` int32, page of positions `i*S .. (i+1)*S`; entries that are unused, or
            left of the window of the row's first new token, are 0.
        kv_lens: `[B]` int32, positions of each row after this step.
        cu_q_lens: `[B+1]` int32, ascending; entries past `num_seqs` repeat the last one.
        num_seqs: scalar int32, rows in use.
        window: scalar int32, positions a query sees up to and including its own; 0: all of them.
        sinks: `[N]` float32, joins each head's softmax denominator as `exp(sink)`.
        tree: `[T]` int32; in rows of at most `decode_queries` new tokens bit j says that the token
            sees the row's j-th new token (its own bit must be set, later ones mean nothing); older
            positions are always seen. Longer rows ignore it.
        k_scale, v_scale: `[K]` float32, positive: an 8-bit cache holds `round(x / scale)`,
            saturated. An int8 cache needs them, float8_e4m3fn takes 1 without.
        scale: factor on the scores, default `H ** -0.5`.
        soft_cap: c of `c * tanh(score / c)`, applied after the factor.
        decode_queries: the longest row (1..32 new tokens) that runs as a decode.
        layout: how the cache lies; None: `[L, P, 2, K, S, H]`.
        backend: "reference" (defines correct), "xla", "pallas" (TPU), or "pallas-interpret" (the
            TPU kernels, interpreted on any device with races and stray reads checked).
        kernels: what the Pallas backends are compiled with (`plan_kernels` for these arrays and
            these options).
        work: `attention_work(...)` of the same step and backend, to share it between layers.

    Returns:
        `(out [T, N, H] in the dtype of q, cache)`.

    Raises:
        ValueError: shapes or dtypes that don't fit together, named with both sides.
    """
    data = LayerData(layer, window, sinks, tree)
    tables = BatchTables(page_table, kv_lens, cu_q_lens, num_seqs)
    checks.check_ranks({"q": (q, 3), "k_new": (k_new, 3), "v_new": (v_new, 3), "cache": (cache, 6)})
    if layout is None:
        layout = kv_layout(
            num_kv_heads=cache.shape[3],
            head_dim=q.shape[2],
            page_size=cache.shape[4],
            dtype=str(cache.dtype),
        )
    _check_heads(q, k_new, v_new, layout)
    checks.check_queries({"q": q, "k_new": k_new, "v_new": v_new})
    checks.check_cache(cache, layout)
    checks.check_tables(tables, data)
    checks.check_layer_data(data, q.shape[0], q.shape[1], decode_queries)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.check_scales(scales, layout.dtype, (layout.num_kv_heads,))

    keys, values = pack_kv(
        layout,
        to_cache_dtype(k_new, cache.dtype, k_scale),
        to_cache_dtype(v_new, cache.dtype, v_scale),
    )
    out, cache = attend(
        pack_queries(layout, scale_heads(q, k_scale)),
        keys,
        values,
        cache,
        data,
        tables,
        work,
        layout=layout,
        scoring=scoring_of(data, q.shape[2] ** -0.5 if scale is None else scale, soft_cap),
        run=RunOn(backend, str(q.dtype), decode_queries, kernels),
    )
    return scale_heads(unpack_output(layout, out), v_scale).astype(q.dtype), cache


def _check_heads(q: Array, k_new: Array, v_new: Array, layout: KvLayout) -> None:
    num_tokens, num_heads, head_dim = q.shape
    expected = (num_tokens, layout.num_kv_heads, head_dim)
    if k_new.shape != expected or v_new.shape != expected:
        raise ValueError(
            f"k_new and v_new must be [T, K, H] = {expected}, got {k_new.shape} and {v_new.shape}"
        )
    if head_dim != layout.head_dim:
        raise ValueError(f"q has heads of {head_dim}, the layout of {layout.head_dim}")
    if num_heads % layout.num_kv_heads:
        raise ValueError(
            f"query heads ({num_heads}) must be a multiple of KV heads ({layout.num_kv_heads})"
        )
