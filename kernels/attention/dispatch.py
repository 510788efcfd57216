"""The seam between the ops and the backends: which backend runs a layer, and what it is given.

Every backend gets rows as they lie in the cache: queries and new keys and values packed into lanes,
keys and values already in the cache's dtype. None knows of scales or of heads side by side.
Never picks a backend by looking at devices or the environment: the caller knows where it runs.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels.attention.cache_layout import KvLayout
from kernels.attention.geometry import Scoring
from kernels.attention.options import LayerData
from kernels.attention.ragged import BatchTables
from kernels.attention.reference import reference_attention
from kernels.attention.xla import XlaWork, xla_attention, xla_work

Backend = Literal["reference", "xla"]
BACKENDS: tuple[str, ...] = ("reference", "xla")
AttentionWork = XlaWork


def attention_work(
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    num_tokens: int,
    page_size: int,
    backend: Backend = "xla",
) -> AttentionWork:
    """Computes what all layers of one step share; `ragged_paged_attention` takes it as `work`.

    Every backend's work has `places`, where each token belongs.
    """
    check_backend(backend)
    tables = BatchTables(page_table, kv_lens, cu_q_lens, num_seqs)
    return xla_work(tables, num_tokens=num_tokens, page_size=page_size)


def attend(
    q: Float[Array, "T N Wk"],
    k_new: Float[Array, "T R Wk"],
    v_new: Float[Array, "T R Wk"] | None,
    cache: Float[Array, "L P planes R S Wk"],
    data: LayerData,
    tables: BatchTables,
    work: AttentionWork | None,
    *,
    layout: KvLayout,
    scoring: Scoring,
    backend: Backend,
    decode_queries: int,
) -> tuple[Float[Array, "T N Wv"], Array]:
    """Runs one layer; returns `(out, cache)`, out in float32 or the dtype of `q`.

    `v_new` is None for shared rows, whose first `Wv` lanes are the values. Padding tokens yield
    zeros.
    """
    check_backend(backend)
    if backend == "reference":
        return reference_attention(
            q,
            k_new,
            v_new,
            cache,
            data,
            tables,
            scoring=scoring,
            value_width=layout.value_width,
            decode_queries=decode_queries,
        )
    if work is None:
        work = xla_work(tables, num_tokens=q.shape[0], page_size=layout.page_size)
    return xla_attention(
        q,
        k_new,
        v_new,
        cache,
        data,
        work,
        scoring=scoring,
        value_width=layout.value_width,
        decode_queries=decode_queries,
    )


def check_backend(backend: str) -> None:
    """Raises `ValueError` for a backend nobody has."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
