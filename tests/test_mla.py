"""Latent attention: the op against the float64 oracle, over every layout and cache dtype."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention import mla_ragged_paged_attention
from kernels.attention.cache_layout import KvLayout, kv_layout, latent_layout
from tests.attention_cases import PLAIN_BACKENDS, Case, assert_correct, make_case

LATENT, ROPE = 24, 8
ROWS = [(5, 1), (0, 7), (64, 1), (31, 33), (2, 2)]
STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend")
OP = jax.jit(mla_ragged_paged_attention, static_argnames=STATIC)


def latent_case(rows: list[tuple[int, int]] = ROWS, **spec: Any) -> Case:
    shape: dict[str, Any] = dict(heads=(4, 1, LATENT + ROPE), value_width=LATENT, scale=0.25)
    return make_case(rows, **shape | spec)


def arguments(case: Case, cache: np.ndarray) -> tuple[Any, ...]:
    q, new, latent = case.q, case.k_new[:, 0], case.spec.value_width
    parts = (q[..., :latent], q[..., latent:], new[:, :latent], new[:, latent:])
    return (*parts, cache, np.int32(case.layer), *case.tables())


def options_of(case: Case) -> dict[str, Any]:
    options = case.options() | case.static_options()
    if case.k_scale is not None:
        for name, replaced in (("k_scale", "kv_scale"), ("v_scale", "k_rope_scale")):
            options[replaced] = options.pop(name)[0]
    return options


def run(case: Case, backend: str, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    out, cache = OP(*arguments(case, case.cache), **options_of(case) | more, backend=backend)
    return np.asarray(out), np.asarray(cache)


def padded(cache: np.ndarray, layout: KvLayout) -> np.ndarray:
    """The cache with whole registers: zeros behind owned rows, NaN behind those of nobody."""
    owned = ~np.isnan(cache[..., :1].astype(np.float32))
    spare = np.ones(layout.width - cache.shape[-1], np.float32)
    rest = np.where(owned, 0, np.nan) * spare
    return np.concatenate([cache, rest.astype(cache.dtype)], axis=-1)


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_matches_oracle(heads: int) -> None:
    case = latent_case(heads=(heads, 1, LATENT + ROPE))
    for backend in PLAIN_BACKENDS if heads == 3 else ("reference",):
        assert_correct(case, *run(case, backend))


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_every_option(backend: str) -> None:
    rows = [*ROWS, (40, 8), (100, 4)]
    options: dict[str, Any] = dict(window=33, sinks=True, tree=True, soft_cap=3.0, decode_queries=8)
    case = latent_case(rows, **options)
    assert_correct(case, *run(case, backend))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scale", [0.04, 25.0])
def test_scales(kv_dtype: str, scale: float) -> None:
    case = latent_case(kv_dtype=kv_dtype, scales=(scale, scale))
    case = replace(case, v_scale=case.k_scale)
    for backend in PLAIN_BACKENDS:
        assert_correct(case, *run(case, backend))


def test_latents_and_rope_keys_have_scales_of_their_own() -> None:
    one = latent_case(kv_dtype="int8", scales=(0.5, 0.5))
    one = replace(one, k_scale=np.array([0.5], np.float32), v_scale=np.array([0.5], np.float32))
    # The same numbers with rope keys eight times as large, and queries an eighth.
    times = np.where(np.arange(LATENT + ROPE) < LATENT, 1, 8).astype(np.float32)
    other = replace(
        one, q=one.q / times, k_new=one.k_new * times, v_scale=np.array([4.0], np.float32)
    )
    for got, right in zip(run(other, "xla"), run(one, "xla"), strict=True):
        np.testing.assert_array_equal(got, right)


def test_bfloat16() -> None:
    case = latent_case(q_dtype="bfloat16", kv_dtype="bfloat16")
    assert_correct(case, *run(case, "reference"))


def test_layout_of_a_latent_cache() -> None:
    given: dict[str, Any] = dict(latent_dim=512, rope_dim=64, page_size=32, dtype="bfloat16")
    assert latent_layout(**given).shape(2, 5) == (2, 5, 1, 1, 32, 576)
    layout = latent_layout(**given, lanes=128)
    assert layout.shape(2, 5) == (2, 5, 1, 1, 32, 640)
    assert layout.page_bytes(2) == 2 * 32 * 640 * 2
    geometry = layout.geometry(16, "bfloat16")
    assert (geometry.latent, geometry.key_width, geometry.value_width) == (True, 640, 512)


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_padded_rows(backend: str) -> None:
    case = latent_case()
    layout = latent_layout(
        latent_dim=LATENT, rope_dim=ROPE, page_size=16, dtype="float32", lanes=128
    )

    options = case.static_options() | dict(layout=layout, backend=backend)
    out, cache = OP(*arguments(case, padded(case.cache, layout)), **options)
    assert_correct(case, np.asarray(out), np.asarray(cache)[..., : LATENT + ROPE])
    pages = np.asarray(cache)[:, 1:]
    np.testing.assert_array_equal(pages, padded(pages[..., : LATENT + ROPE], layout))


def bad(layout: KvLayout | None = None, **changed: Any) -> None:
    case = latent_case()
    named = dict(
        zip(
            ("q_latent", "q_rope", "kv_new", "k_rope_new"),
            arguments(case, case.cache),
            strict=False,
        )
    )
    rest = arguments(case, case.cache)[4:]
    mla_ragged_paged_attention(*list((named | changed).values()), *rest, scale=1.0, layout=layout)


def test_refuses_what_does_not_fit() -> None:
    case = latent_case()
    tokens = case.q.shape[0]
    wide = np.zeros((tokens, ROPE + 1), np.float32)
    two_planes = kv_layout(num_kv_heads=1, head_dim=LATENT + ROPE, page_size=16, dtype="float32")
    for message, change in {
        "kv_new and k_rope_new must be": dict(k_rope_new=wide),
        "agree in [T, N]": dict(q_rope=case.q[:, :2, LATENT:]),
        "kv_new must have 2 dimensions": dict(kv_new=case.k_new[..., :LATENT]),
        "need a latent_layout": dict(layout=two_planes),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            bad(**change)
