"""The op on the TPU kernels, interpreted: both calls in one step, lane packing, scales, trees.

What one kernel does is tested beside it (`test_pallas_decode.py`, `test_pallas_chunk.py`); here is
what only the op can get wrong. Races, stray and uninitialised reads end a case.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention import plan_kernels, ragged_paged_attention, small_plan
from kernels.attention.cache_layout import KvLayout, kv_layout
from kernels.attention.pallas.decode_blocks import DecodeBlocks
from kernels.chips import CHIPS
from tests.attention_cases import Case, assert_correct, make_case
from tests.test_attention_layout import laid_out

# Interpreted kernels take long where cores are shared.
pytestmark = pytest.mark.timeout(600)

# Interpreted code is not worth optimising: it runs once.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend", "kernels")
OP = jax.jit(ragged_paged_attention, static_argnames=STATIC, compiler_options=FAST_COMPILE)
# Decodes and chunks in any order, at page and block borders; a verify row; padding behind.
ROWS = [(31, 1), (0, 40), (32, 1), (63, 3), (0, 1), (20, 33)]


def layout_of(case: Case, num_shards: int = 1) -> KvLayout:
    spec = case.spec
    _, k, h = spec.heads
    return kv_layout(
        num_kv_heads=k,
        head_dim=h,
        page_size=spec.page_size,
        dtype=spec.kv_dtype,
        lanes=128,
        num_shards=num_shards,
    )


def run(case: Case, layout: KvLayout) -> tuple[np.ndarray, np.ndarray]:
    geometry = layout.geometry(case.spec.heads[0], case.spec.q_dtype)
    out, cache = OP(
        *case.arguments()[:3],
        laid_out(case.cache, layout),
        *case.arguments()[4:],
        **case.options(),
        **case.static_options(),
        layout=layout,
        backend="pallas-interpret",
        kernels=small_plan(geometry, case.scoring(), decode_queries=case.spec.decode_queries),
    )
    return np.asarray(out), np.asarray(cache)


CASES: dict[str, dict[str, Any]] = {
    "two heads of 64 side by side": dict(heads=(6, 2, 64), window=37, sinks=True),
    "keys and values of one head of 64 side by side": dict(heads=(3, 1, 64), soft_cap=4.0),
    "fp8 with scales, bfloat16 queries": dict(
        heads=(4, 2, 128), q_dtype="bfloat16", kv_dtype="float8_e4m3fn", scales=(0.04, 25.0)
    ),
    "verify rows and a tree": dict(heads=(5, 1, 80), decode_queries=4, tree=True),
}


# What a reviewer tried: rows at every border of a verify row, steps of one kind, wide page tables.
BORDERS: dict[str, dict[str, Any]] = {
    "verify rows around the limit, a window of one": dict(
        rows=[(0, 1), (16, 1), (15, 2), (32, 3), (30, 4), (0, 5), (47, 33)],
        heads=(21, 3, 80),
        window=1,
        sinks=True,
        decode_queries=3,
        tree=True,
    ),
    "padding alone": dict(rows=[], heads=(2, 1, 128)),
    "a page table of many lines, a window of a page and one": dict(
        rows=[(4200, 1), (32, 1), (31, 1), (0, 33), (4090, 40), (33, 2)],
        heads=(2, 1, 128),
        window=33,
        pages_per_seq=133,
    ),
    "tiny and huge scales": dict(heads=(2, 1, 128), kv_dtype="float8_e4m3fn", scales=(1e-6, 1e4)),
    "rows without a new token, a small soft cap": dict(
        rows=[(20, 1), (0, 1), (31, 33), (3, 0), (5, 1)],
        heads=(3, 1, 96),
        soft_cap=1e-3,
        scale=25.0,
    ),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in BORDERS)]
)
def test_op_matches_oracle_on_the_kernels(name: str) -> None:
    spec: dict[str, Any] = (
        dict(rows=ROWS, page_size=32, num_tokens=88, num_rows=8) | (CASES | BORDERS)[name]
    )
    case = make_case(**spec)
    if case.sinks is not None:
        case.sinks[:3] = [3e38, -3e38, -np.inf]  # all the weight, none, no sink
    layout = layout_of(case)
    out, cache = run(case, layout)
    expected = assert_correct(case, out, None, slack=1.0 if case.k_scale is None else 2.0)
    np.testing.assert_array_equal(
        cache[:, 1:].astype(np.float32), laid_out(expected.cache, layout)[:, 1:].astype(np.float32)
    )


def test_kernels_and_their_backend_go_together() -> None:
    case = make_case([(0, 1)], heads=(2, 1, 128), page_size=32)
    layout = layout_of(case)
    plan = small_plan(layout.geometry(2, "float32"), case.scoring())
    with pytest.raises(ValueError, match=r"kernels .* go with the pallas backends, got none"):
        ragged_paged_attention(*case.arguments(), layout=layout, backend="pallas")
    with pytest.raises(ValueError, match="go with the pallas backends, got some with 'xla'"):
        ragged_paged_attention(*case.arguments(), layout=layout, kernels=plan)


UNPLANNED: dict[str, dict[str, Any]] = {
    "num_q_heads=2, got num_q_heads=4": dict(heads=(4, 1, 128)),
    "page_size=32, got page_size=64": dict(page_size=64),
    "q_dtype=float32, got q_dtype=bfloat16": dict(q_dtype="bfloat16"),
    "has_sinks=False, got has_sinks=True": dict(sinks=True),
    "soft_cap=None, has_window=False, got soft_cap=3.0, has_window=True": dict(
        soft_cap=3.0, window=20
    ),
    "scale=0.08838834764831845, got scale=1.0": dict(scale=1.0),
    "decode_queries=1, got decode_queries=3": dict(decode_queries=3),
}


@pytest.mark.parametrize("message", UNPLANNED)
def test_kernels_planned_for_something_else_are_refused(message: str) -> None:
    shape: dict[str, Any] = dict(heads=(2, 1, 128), page_size=32)
    planned = make_case([(0, 1)], **shape)
    plan = small_plan(layout_of(planned).geometry(2, "float32"), planned.scoring())
    case = make_case([(0, 1)], **shape | UNPLANNED[message])
    with pytest.raises(ValueError, match=re.escape(f"kernels were planned for {message}")):
        ragged_paged_attention(
            *case.arguments(),
            **case.options(),
            **case.static_options(),
            layout=layout_of(case),
            backend="pallas",
            kernels=plan,
        )


def test_a_plan_for_longer_verify_rows_than_a_kernel_takes_is_refused() -> None:
    case = make_case([(0, 1)], heads=(2, 1, 128), page_size=32)
    planned = (layout_of(case).geometry(2, "float32"), case.scoring())
    for plan in (partial(small_plan, *planned), partial(plan_kernels, *planned, CHIPS["v6e"])):
        with pytest.raises(ValueError, match="decode_queries must be 1 to 8, got 9"):
            plan(decode_queries=9)


def test_blocks_that_do_not_fit_a_chip_are_refused_with_some_that_do() -> None:
    geometry = kv_layout(
        num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", lanes=128
    ).geometry(32, "bfloat16")
    scoring = make_case([(0, 1)]).scoring()
    large = DecodeBlocks(block_tokens=1024, num_slots=8, heads_per_tile=2)
    with pytest.raises(ValueError, match=r"bytes of VMEM.*v4.*that fits: DecodeBlocks"):
        plan_kernels(geometry, scoring, CHIPS["v4"], decode=large)
    assert plan_kernels(geometry, scoring, CHIPS["v5e"], decode=large).decode == large
