"""Attention backends against a float64 oracle: ragged mixes, borders, NaN in unowned slots."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import BACKENDS, ragged_paged_attention
from tests.attention_cases import Case, make_case, oracle

MIXES = {
    "one decode": dict(rows=[(0, 1)], num_tokens=1, num_rows=1),
    "decodes at page borders": dict(
        rows=[(15, 1), (16, 1), (17, 1), (0, 1), (126, 1)], num_tokens=8, num_rows=8
    ),
    "decodes past one KV block": dict(
        rows=[(127, 1), (128, 1), (129, 1)], num_tokens=4, num_rows=4, pages_per_seq=9
    ),
    "whole prompt": dict(rows=[(0, 33)], num_tokens=64, num_rows=2),
    "chunk continues mid page": dict(rows=[(21, 40)], num_tokens=40, num_rows=1),
    "mixed": dict(
        rows=[(5, 1), (0, 7), (64, 1), (31, 33), (2, 2)], num_tokens=64, num_rows=8, seed=3
    ),
    "full to the last token": dict(rows=[(0, 32), (96, 32)], num_tokens=64, num_rows=2),
    "no padding rows": dict(rows=[(3, 1), (4, 1)], num_tokens=2, num_rows=2),
    "empty step": dict(rows=[], num_tokens=4, num_rows=2),
}
HEADS = [(4, 4, 16), (9, 3, 64), (8, 1, 8), (5, 1, 16), (16, 2, 32)]


def run(case: Case, backend: str) -> tuple[np.ndarray, np.ndarray]:
    op = jax.jit(ragged_paged_attention, static_argnames="backend")
    out, cache = op(*case.arguments(), backend=backend)
    return np.asarray(out), np.asarray(cache)


def assert_matches(case: Case, backend: str) -> None:
    out, cache = run(case, backend)
    expected, expected_cache = oracle(case)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)
    padding = out[case.cu_q_lens[case.num_seqs] :]
    assert np.array_equal(padding, np.zeros_like(padding))
    # The null page (0) takes the writes of padding tokens; every other page is exact.
    np.testing.assert_array_equal(cache[:, 1:], expected_cache[:, 1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MIXES)
def test_matches_oracle(name: str, backend: str) -> None:
    assert_matches(make_case(**MIXES[name]), backend)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_groupings(heads: tuple[int, int, int]) -> None:
    rows = [(5, 1), (20, 9), (0, 3)]
    assert_matches(make_case(rows, num_tokens=16, num_rows=4, heads=heads), "xla")


@pytest.mark.parametrize("page_size", [8, 16, 128, 256])
def test_page_sizes(page_size: int) -> None:
    rows = [(page_size - 1, 1), (page_size, 1), (0, 30)]
    case = make_case(rows, num_tokens=32, num_rows=4, page_size=page_size, pages_per_seq=4)
    assert_matches(case, "xla")


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), max_size=5),
    seed=st.integers(0, 999),
)
def test_any_mix_matches_oracle(rows: list[tuple[int, int]], seed: int) -> None:
    assert_matches(make_case(rows, num_tokens=64, num_rows=6, seed=seed), "xla")


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 59), max_size=3, unique=True), seed=st.integers(0, 99))
def test_any_split_of_a_prompt_gives_the_same_output(cuts: list[int], seed: int) -> None:
    whole = make_case([(0, 60)], num_tokens=64, num_rows=1, seed=seed)
    expected, expected_cache = run(whole, "xla")
    cache = whole.cache
    edges = [0, *sorted(cuts), 60]
    for first, last in pairwise(edges):
        pad = lambda x: np.concatenate([x[first:last], np.zeros_like(x)])[:64]  # noqa: B023, E731
        case = Case(
            pad(whole.q),
            pad(whole.k_new),
            pad(whole.v_new),
            cache,
            whole.layer,
            whole.page_table,
            np.array([last], np.int32),
            np.array([0, last - first], np.int32),
            1,
        )
        out, cache = run(case, "xla")
        np.testing.assert_allclose(out[: last - first], expected[first:last], rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(cache[:, 1:], expected_cache[:, 1:])


def test_bfloat16_cache_and_queries() -> None:
    case = make_case([(5, 1), (0, 20)], num_tokens=32, num_rows=2)
    low = lambda x: np.asarray(jax.numpy.asarray(x, jax.numpy.bfloat16))  # noqa: E731
    rounded = replace(
        case,
        q=low(case.q),
        k_new=low(case.k_new),
        v_new=low(case.v_new),
        cache=low(case.cache),
    )
    out, _ = run(rounded, "xla")
    expected, _ = oracle(rounded)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8, atol=1e-3)


BAD = {
    "k_new and v_new": lambda c: (c.q, c.k_new[:-1], c.v_new[:-1], *c.arguments()[3:]),
    "query heads (3)": lambda c: (c.q[:, :3], *c.arguments()[1:]),
    "cache must have 6": lambda c: (*c.arguments()[:3], c.cache[0], *c.arguments()[4:]),
    "page_table has": lambda c: (*c.arguments()[:6], c.kv_lens[:-1], *c.arguments()[7:]),
    "differ in dtype": lambda c: (c.q.astype(np.float16), *c.arguments()[1:]),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses_what_does_not_fit(message: str) -> None:
    case = make_case([(5, 1), (0, 20)], num_tokens=32, num_rows=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_paged_attention(*BAD[message](case))
