"""The public attention op: checks at trace time, then the backend the caller chose.

Owns the op's contract and its errors. Never picks a backend by looking at devices or the
environment: the caller knows where it runs.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels.attention.reference import reference_attention
from kernels.attention.xla import XlaWork, attention_work, xla_attention

Backend = Literal["reference", "xla"]
BACKENDS: tuple[str, ...] = ("reference", "xla")


def ragged_paged_attention(
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
    scale: float | None = None,
    backend: Backend = "xla",
    work: XlaWork | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K S H"]]:
    """Causal attention of a packed ragged batch of chunks and decodes over a paged KV cache.

    Row b (b < `num_seqs`) owns the packed tokens `cu_q_lens[b] .. cu_q_lens[b + 1]`; they are the
    last of its `kv_lens[b]` positions. Their K and V are written into the pages of `page_table`
    (once each, before any query reads them), then every query attends to the positions up to and
    including its own. Padding tokens (at and after `cu_q_lens[num_seqs]`) yield zeros.

    Args:
        q, k_new, v_new: queries `[T, N, H]`, new keys and values `[T, K, H]`; N is a multiple of K.
        cache: `[L, P, 2, K, S, H]` (`kernels.attention.cache_layout`); donate it, it is returned.
        layer: scalar int32, the layer of `cache` to write and read.
        page_table: `[B, W]` int32, page of positions `i*S .. (i+1)*S`; unused entries are 0.
        kv_lens: `[B]` int32, positions of each row after this step.
        cu_q_lens: `[B+1]` int32, ascending; entries past `num_seqs` repeat the last one.
        num_seqs: scalar int32, rows in use.
        scale: factor on the scores, default `H ** -0.5`.
        backend: "reference" (defines correct) or "xla".
        work: `attention_work(...)` of the same step, to share it between layers ("xla" only).

    Returns:
        `(out [T, N, H], cache)`.

    Raises:
        ValueError: shapes or dtypes that don't fit together, named with both sides.
    """
    _check(q, k_new, v_new, cache, page_table, kv_lens, cu_q_lens)
    factor = float(q.shape[-1]) ** -0.5 if scale is None else scale
    if backend == "reference":
        return reference_attention(
            q, k_new, v_new, cache, layer, page_table, kv_lens, cu_q_lens, num_seqs, scale=factor
        )
    if backend != "xla":
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if work is None:
        work = attention_work(
            page_table,
            kv_lens,
            cu_q_lens,
            num_seqs,
            num_tokens=q.shape[0],
            page_size=cache.shape[4],
        )
    return xla_attention(q, k_new, v_new, cache, layer, work, scale=factor)


def _check(
    q: Array,
    k_new: Array,
    v_new: Array,
    cache: Array,
    page_table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
) -> None:
    for name, array, rank in (
        ("q", q, 3),
        ("k_new", k_new, 3),
        ("v_new", v_new, 3),
        ("cache", cache, 6),
        ("page_table", page_table, 2),
        ("kv_lens", kv_lens, 1),
        ("cu_q_lens", cu_q_lens, 1),
    ):
        if array.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got shape {array.shape}")
    num_tokens, num_heads, head_dim = q.shape
    _, _, planes, num_kv_heads, _, cache_head_dim = cache.shape
    expected = (num_tokens, num_kv_heads, head_dim)
    if k_new.shape != expected or v_new.shape != expected:
        raise ValueError(
            f"k_new and v_new must be [T, K, H] = {expected}, got {k_new.shape} and {v_new.shape}"
        )
    if planes != 2 or cache_head_dim != head_dim:
        raise ValueError(f"cache must be [L, P, 2, K, S, {head_dim}], got {cache.shape}")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query heads ({num_heads}) must be a multiple of KV heads ({num_kv_heads})"
        )
    num_rows = page_table.shape[0]
    if kv_lens.shape != (num_rows,) or cu_q_lens.shape != (num_rows + 1,):
        raise ValueError(
            f"page_table has {num_rows} rows, so kv_lens must be [{num_rows}] and cu_q_lens "
            f"[{num_rows + 1}], got {kv_lens.shape} and {cu_q_lens.shape}"
        )
    if not q.dtype == k_new.dtype == v_new.dtype:
        raise ValueError(
            f"q, k_new, v_new differ in dtype: {q.dtype}, {k_new.dtype}, {v_new.dtype}"
        )
