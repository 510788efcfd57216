"""The latent op on the TPU kernels, interpreted: both calls in one step, with one plane of rows.

What one kernel does is tested beside it; here is what only the op can get wrong: padded rows,
values that are a part of the keys, scales. Races, stray and uninitialised reads end a case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention import mla_ragged_paged_attention, small_plan
from kernels.attention.cache_layout import KvLayout, latent_layout
from tests.attention_cases import Case, assert_correct
from tests.test_mla import arguments, latent_case, options_of, padded
from tests.test_pallas_attention import FAST_COMPILE, ROWS

# Interpreted kernels take long where cores are shared.
pytestmark = pytest.mark.timeout(600)

STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend", "kernels")
OP = jax.jit(mla_ragged_paged_attention, static_argnames=STATIC, compiler_options=FAST_COMPILE)

# Latent lanes that fill a register with keys that don't, and latents that share it with rope keys.
WHOLE: dict[str, Any] = dict(heads=(5, 1, 128 + 64), value_width=128)
SHARED: dict[str, Any] = dict(heads=(4, 1, 24 + 8), value_width=24)
LOW: dict[str, Any] = dict(q_dtype="bfloat16", kv_dtype="bfloat16")

QUICK: dict[str, dict[str, Any]] = {
    "decodes and chunks, every option": WHOLE | dict(window=37, sinks=True, soft_cap=3.0),
    "verify rows, latents beside rope keys": SHARED | LOW | dict(decode_queries=4, tree=True),
}
LONG: dict[str, dict[str, Any]] = {
    "plain": WHOLE,
    "plain, bfloat16": WHOLE | LOW,
    "int8 with scales": SHARED | dict(kv_dtype="int8", scales=(0.04, 0.04)),
    "fp8 with scales, bfloat16 queries": WHOLE
    | dict(q_dtype="bfloat16", kv_dtype="float8_e4m3fn", scales=(25.0, 25.0)),
    "a whole step of decodes": WHOLE | dict(rows=[(31, 1), (0, 1), (32, 1), (64, 1)]),
    "a whole step of chunks": WHOLE | dict(rows=[(0, 40), (20, 33)]),
}


def layout_of(case: Case) -> KvLayout:
    spec = case.spec
    assert spec.value_width is not None
    return latent_layout(
        latent_dim=spec.value_width,
        rope_dim=spec.heads[2] - spec.value_width,
        page_size=spec.page_size,
        dtype=spec.kv_dtype,
        lanes=128,
    )


def check(rows: list[tuple[int, int]] = ROWS, **spec: Any) -> None:
    shape = dict(page_size=32, num_tokens=88, num_rows=8, scale=spec["heads"][2] ** -0.5)
    case = latent_case(rows, **shape | spec)
    if case.k_scale is not None:  # the oracle has one scale for keys and one for values
        case = replace(case, v_scale=case.k_scale)
    layout = layout_of(case)
    geometry = layout.geometry(spec["heads"][0], case.spec.q_dtype)
    plan = small_plan(geometry, case.scoring(), decode_queries=case.spec.decode_queries)
    out, cache = OP(
        *arguments(case, padded(case.cache, layout)),
        **options_of(case),
        layout=layout,
        backend="pallas-interpret",
        kernels=plan,
    )
    expected = assert_correct(case, np.asarray(out), None, slack=2.0 if spec.get("scales") else 1.0)
    np.testing.assert_array_equal(
        np.asarray(cache)[:, 1:].astype(np.float32),
        padded(expected.cache, layout)[:, 1:].astype(np.float32),
    )


@pytest.mark.parametrize("name", QUICK)
def test_matches_oracle(name: str) -> None:
    check(**QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_matches_oracle_long(name: str) -> None:
    check(**LONG[name])
