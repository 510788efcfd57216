"""What a layer may ask for, against the oracle: windows, sinks, soft caps, trees, 8-bit caches."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention_work, ragged_paged_attention
from kernels.attention.quantize import to_cache_dtype
from tests.attention_cases import DTYPES, PLAIN_BACKENDS, Case, assert_correct, make_case, oracle
from tests.attention_catalogue import MIXES, Rows, decodes, verifies

# One compiled program serves all cases of a test: sizes are fixed, a window is data.
SHAPE: dict[str, Any] = dict(num_tokens=150, num_rows=24, pages_per_seq=12, num_pages=200)
STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend")
OP = jax.jit(ragged_paged_attention, static_argnames=STATIC)
MIXED = MIXES["decodes and chunks"]
WINDOWS = [0, 1, 2, 15, 16, 17, 40, 64, 1000]


def run(case: Case, backend: str = "xla") -> tuple[np.ndarray, np.ndarray]:
    out, cache = OP(*case.arguments(), **case.options() | case.static_options(), backend=backend)
    return np.asarray(out), np.asarray(cache)


def assert_matches(case: Case, backend: str = "xla") -> None:
    assert_correct(case, *run(case, backend))


def windowed_rows(window: int) -> Rows:
    """Decodes at every border of the window, and chunks that start before, at and after it."""
    near = min(window, 100)
    return [*decodes(16, near, 64, 128), (near, 9), (170, 1), (max(near - 1, 0), 20), (120, 33)]


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_window(backend: str, window: int) -> None:
    case = make_case(windowed_rows(window), **SHAPE, window=window)
    if 0 < window < 64:
        assert (case.page_table[:, 0] == 0).sum() > 3, "no page left a window"
    assert_matches(case, backend)


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
@pytest.mark.parametrize("last", [32767, 32768, 32769, 999_999])
def test_positions_far_beyond_16_bits(backend: str, last: int) -> None:
    """A window keeps the pool small, so positions up to a million need no memory."""
    size = dict(page_size=256, pages_per_seq=4096, num_pages=24, num_tokens=8, num_rows=3)
    if backend == "reference":  # gathers whole page tables
        size |= dict(pages_per_seq=129, num_tokens=4)
        last = min(last, 32769)
    rows = [(last - 1, 1), (last - 3, 2)]
    assert_matches(make_case(rows, **size, heads=(2, 1, 8), window=300), backend)


def test_layers_with_and_without_a_window_share_one_program() -> None:
    traces = 0

    @jax.jit
    def step(*arguments: Any, window: Any) -> Any:
        nonlocal traces
        traces += 1
        return ragged_paged_attention(*arguments, window=window, backend="reference")

    for window in (0, 17):
        case = make_case(MIXED, **SHAPE, window=window)
        out, cache = step(*case.arguments(), window=case.window())
        assert_correct(case, np.asarray(out), np.asarray(cache))
    assert traces == 1


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_sinks(backend: str) -> None:
    case = make_case(MIXED, **SHAPE, heads=(6, 2, 16), sinks=True)
    assert_matches(case, backend)
    extreme = np.array([-50, 50, 0, -1, 1, 9], np.float32)
    assert_matches(replace(case, sinks=extreme), backend)
    # A sink of minus infinity is none.
    without = replace(case, sinks=np.full_like(extreme, -np.inf))
    assert_correct(replace(case, sinks=None), *run(without, backend))


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_soft_cap(backend: str) -> None:
    """Applied after the scale, and not small: without it the result is another."""
    case = make_case(MIXED, **SHAPE, soft_cap=5.0, scale=1.5)
    assert_matches(case, backend)
    uncapped = replace(case, spec=replace(case.spec, soft_cap=None))
    assert np.abs(oracle(case).out - oracle(uncapped).out).max() > 0.1


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_trees(backend: str) -> None:
    rows = [*verifies(16, 64)[:12], (10, 9), (40, 20)]  # the last two are too long for a tree
    case = make_case(rows, **SHAPE, tree=True, decode_queries=8, seed=4)
    assert case.tree is not None
    assert_matches(case, backend)
    assert np.abs(oracle(case).out - oracle(replace(case, tree=None)).out).max() > 0.1
    # Bits of later tokens mean nothing.
    nth = np.concatenate([np.arange(q_len) for _, q_len in rows] + [np.zeros(150, int)])[:150]
    noisy = replace(case, tree=(case.tree | (-2 << nth)).astype(np.int32))
    np.testing.assert_array_equal(run(noisy, backend)[0], run(case, backend)[0])


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_scales(backend: str, kv_dtype: str) -> None:
    for scale in (0.04, 25.0):
        kv: dict[str, Any] = dict(kv_dtype=kv_dtype, scales=(scale, scale / 3))
        assert_matches(make_case(MIXED, **SHAPE, heads=(6, 2, 16), **kv), backend)


def test_float8_without_scales_and_bfloat16_queries() -> None:
    low: dict[str, Any] = dict(q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    for backend in PLAIN_BACKENDS:
        assert_matches(make_case(MIXED, **SHAPE, **low), backend)


def test_rounds_half_to_even_and_saturates() -> None:
    def stored(values: list[float], dtype: str, scale: float | None) -> list[float]:
        scales = None if scale is None else jnp.float32([scale])
        rows = jnp.float32(values)[:, None, None]
        return to_cache_dtype(rows, DTYPES[dtype], scales).astype(jnp.float32).ravel().tolist()

    halves = [1.0, 3.0, 5.0, -1.0, -3.0, 253.0, 255.0, 1e9, -1e9]
    assert stored(halves, "int8", 2.0) == [0, 2, 2, 0, -2, 126, 127, 127, -127]
    wide = [447.0, 449.0, 464.0, 1e9, -1e9, float("inf"), 0.4375 + 2**-6]
    assert stored(wide, "float8_e4m3fn", None) == [448, 448, 448, 448, -448, 448, 0.4375]


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_everything_at_once(backend: str, kv_dtype: str) -> None:
    rows = [*MIXED, (40, 8), (100, 4), (150, 1)]
    options: dict[str, Any] = dict(window=33, sinks=True, tree=True, soft_cap=3.0, decode_queries=8)
    kv: dict[str, Any] = dict(
        q_dtype="bfloat16", kv_dtype=kv_dtype, scales=(0.1, 2.0) if kv_dtype == "int8" else None
    )
    assert_matches(make_case(rows, **SHAPE, heads=(6, 2, 16), **options, **kv), backend)


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_shared_prefix_pages(backend: str) -> None:
    rows = [(40, 1), (35, 3), (50, 20), (5, 1), (32, 1)]
    case = make_case(rows, **SHAPE, shared_pages=2)
    assert len(np.unique(case.page_table[[0, 1, 2, 4], 0])) == 1
    assert_matches(case, backend)


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_any_pairing_of_new_and_old_positions(backend: str) -> None:
    """Rows without a new token stand between others and cost nothing."""
    q_lens = [0, 1, 15, 16, 17]
    rows = [(old, new) for new in q_lens for old in (0, 1, 16) if old + new]
    assert_matches(make_case(rows, **SHAPE), backend)


REFUSED = {
    "window must be int32 []": dict(window=np.float32(3)),
    "sinks must be float32 [4], got float32 [3]": dict(sinks=np.zeros(3, np.float32)),
    "tree must be int32 [150]": dict(tree=np.zeros(3, np.int32), decode_queries=8),
    "a tree applies to rows": dict(tree=np.zeros(150, np.int32)),
    "decode_queries must be 1..32, got 33": dict(decode_queries=33),
    "soft_cap must be positive": dict(soft_cap=0.0),
    "scale must be finite": dict(scale=float("nan")),
    "scale must be a number known at trace time": dict(scale=jnp.float32(1)),
    "decode_queries must be 1..32, got 2.5": dict(decode_queries=2.5),
    "sinks must be an array, got list": dict(sinks=[0.0, 0.0, 0.0, 0.0]),
    "work must be attention_work(...) of backend 'xla'": dict(work=3),
    "k_scale and v_scale apply to 8-bit caches, got float32": dict(
        k_scale=np.ones(2, np.float32), v_scale=np.ones(2, np.float32)
    ),
    "v_scale is missing": dict(k_scale=np.ones(2, np.float32)),
    "backend must be one of": dict(backend="nobody"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_options_that_do_not_fit(message: str) -> None:
    case = make_case(MIXED, **SHAPE)
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_paged_attention(*case.arguments(), **REFUSED[message])


def test_refuses_the_work_of_another_step() -> None:
    case = make_case(MIXED, **SHAPE)
    work = attention_work(*case.tables(), num_tokens=7, page_size=16)
    with pytest.raises(ValueError, match="work is of 7 tokens, q of 150"):
        ragged_paged_attention(*case.arguments(), work=work)


def test_numpy_arrays_will_do() -> None:
    case = make_case([(5, 1), (0, 7)])
    out, cache = ragged_paged_attention(*case.arguments())
    assert_correct(case, np.asarray(out), np.asarray(cache))


def test_refuses_caches_that_do_not_fit() -> None:
    scales = dict(k_scale=np.ones(2, np.float32), v_scale=np.ones(2, np.float32))
    for dtype, options, message in (
        (np.int8, {}, "an int8 cache needs k_scale and v_scale"),
        (np.int8, scales | dict(v_scale=np.ones(3, np.float32)), r"v_scale must be float32 \[2\]"),
        (
            np.int8,
            dict(k_scale=1.0, v_scale=1.0),
            r"k_scale must be float32 \[2\], got float32 \[\]",
        ),
        (np.float16, {}, "a KV cache holds bfloat16, float32, int8, float8_e4m3fn, got float16"),
    ):
        case = make_case(MIXED, **SHAPE)
        case = replace(case, cache=np.zeros(case.cache.shape, dtype))
        with pytest.raises(ValueError, match=message):
            ragged_paged_attention(*case.arguments(), **options)


def test_refuses_indices_that_are_not_int32() -> None:
    case = make_case(MIXED, **SHAPE)
    wrong = replace(case, kv_lens=case.kv_lens.astype(np.int16))
    with pytest.raises(ValueError, match="kv_lens must be int32, got int16"):
        ragged_paged_attention(*wrong.arguments())
