"""The seam between the ops and the backends: which backend runs a layer, and what it is given.

Every backend gets rows as they lie in the cache: queries and new keys and values packed into lanes,
keys and values already in the cache's dtype. None knows of scales or of heads side by side.
Never picks a backend by looking at devices or the environment: the caller knows where it runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.attention.cache_layout import KvLayout
from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.options import LayerData
from kernels.attention.pallas.attention import (
    KernelPlan,
    PallasWork,
    pallas_attention,
    pallas_work,
)
from kernels.attention.ragged import BatchTables
from kernels.attention.reference import reference_attention
from kernels.attention.xla import XlaWork, xla_attention, xla_work

Backend = Literal["reference", "xla", "pallas", "pallas-interpret"]
BACKENDS: tuple[str, ...] = ("reference", "xla", "pallas", "pallas-interpret")
AttentionWork = XlaWork | PallasWork


@dataclass(frozen=True, slots=True)
class RunOn:
    """Backend of a call, dtype of its queries, longest row that runs as a decode, and kernels.

    Queries that a scale was folded into come in float32 whatever they were.
    """

    backend: Backend
    q_dtype: str
    decode_queries: int = 1
    kernels: KernelPlan | None = None


def attention_work(
    page_table: Int[Array, "B W"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    num_seqs: Int[Array, ""],
    *,
    num_tokens: int,
    page_size: int,
    backend: Backend = "xla",
    kernels: KernelPlan | None = None,
) -> AttentionWork:
    """Computes what all layers of one step share; `ragged_paged_attention` takes it as `work`.

    Every backend's work has `places`, where each token belongs. The Pallas backends need the
    `kernels` the op will be called with.
    """
    check_backend(backend, kernels)
    tables = BatchTables(page_table, kv_lens, cu_q_lens, num_seqs)
    if kernels is not None:
        return pallas_work(tables, num_tokens=num_tokens, plan=kernels)
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
    run: RunOn,
) -> tuple[Float[Array, "T N Wv"], Array]:
    """Runs one layer; returns `(out, cache)`, out in float32 or the dtype of `q`.

    `v_new` is None for shared rows, whose first `Wv` lanes are the values. Padding tokens yield
    zeros.
    """
    check_backend(run.backend, run.kernels)
    if run.kernels is not None:
        _check_plan(run.kernels, layout.geometry(q.shape[1], run.q_dtype), scoring, run)
        if work is None:
            work = pallas_work(tables, num_tokens=q.shape[0], plan=run.kernels)
        _check_work(work, PallasWork, q.shape[0], run)
        assert isinstance(work, PallasWork)
        interpreted = run.backend == "pallas-interpret"
        return pallas_attention(
            q.astype(run.q_dtype),
            k_new,
            v_new,
            cache,
            data,
            work,
            plan=run.kernels,
            interpret=interpreted and pltpu.InterpretParams(detect_races=True),
        )
    if run.backend == "reference":
        return reference_attention(
            q,
            k_new,
            v_new,
            cache,
            data,
            tables,
            scoring=scoring,
            value_width=layout.value_width,
            decode_queries=run.decode_queries,
        )
    if work is None:
        work = xla_work(tables, num_tokens=q.shape[0], page_size=layout.page_size)
    _check_work(work, XlaWork, q.shape[0], run)
    assert isinstance(work, XlaWork)
    return xla_attention(
        q,
        k_new,
        v_new,
        cache,
        data,
        work,
        scoring=scoring,
        value_width=layout.value_width,
        decode_queries=run.decode_queries,
    )


def check_backend(backend: str, kernels: KernelPlan | None) -> None:
    """Raises `ValueError` for a backend nobody has, or kernels without their backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend.startswith("pallas") != (kernels is not None):
        given = "none" if kernels is None else "some"
        raise ValueError(
            f"kernels (plan_kernels) go with the pallas backends, got {given} with {backend!r}"
        )


def _check_work(work: AttentionWork, kind: type, num_tokens: int, run: RunOn) -> None:
    """Refuses the work of another backend or of a step of another size."""
    if not isinstance(work, kind):
        raise ValueError(f"work must be attention_work(...) of backend {run.backend!r}")
    if work.places.seqs.shape != (num_tokens,):
        raise ValueError(f"work is of {work.places.seqs.shape[0]} tokens, q of {num_tokens}")


def _check_plan(plan: KernelPlan, geometry: Geometry, scoring: Scoring, run: RunOn) -> None:
    """Refuses kernels that were planned for something else, naming what differs."""
    planned = asdict(plan.geometry) | asdict(plan.scoring)
    planned |= dict(decode_queries=plan.decode.decode_queries)
    given = asdict(geometry) | asdict(scoring) | dict(decode_queries=run.decode_queries)
    other = [name for name in planned if planned[name] != given[name]]
    if other:
        both = (", ".join(f"{name}={side[name]}" for name in other) for side in (planned, given))
        raise ValueError("kernels were planned for {}, got {}".format(*both))
