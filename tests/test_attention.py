"""Attention backends against a float64 oracle: ragged mixes, borders, NaN in unowned slots.

Options (window, sinks, trees, 8-bit caches) are in `test_attention_options.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import ragged_paged_attention
from tests.attention_cases import PLAIN_BACKENDS, Case, assert_correct, make_case
from tests.attention_catalogue import HEAD_COUNTS, MIXES, decodes

# One compiled program serves all mixes.
SHAPE: dict[str, Any] = dict(num_tokens=80, num_rows=12, pages_per_seq=9, num_pages=80)
STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend")
OP = jax.jit(ragged_paged_attention, static_argnames=STATIC)


def run(case: Case, backend: str, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    options = case.options() | case.static_options() | more
    out, cache = OP(*case.arguments(), **options, backend=backend)
    return np.asarray(out), np.asarray(cache)


def assert_matches(case: Case, backend: str) -> None:
    assert_correct(case, *run(case, backend))


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
@pytest.mark.parametrize("name", MIXES)
def test_matches_oracle(name: str, backend: str) -> None:
    assert_matches(make_case(MIXES[name], **SHAPE), backend)


def test_one_token_in_one_row() -> None:
    assert_matches(make_case([(0, 1)], num_tokens=1, num_rows=1), "xla")


def test_padding_tokens_without_a_padding_row() -> None:
    rows = [(9, 1), (20, 5)]
    assert_matches(make_case(rows, num_tokens=9, num_rows=2), "xla")


def test_lengths_around_pages_and_blocks() -> None:
    assert_matches(make_case(decodes(16, 64, 128), **SHAPE), "xla")


@pytest.mark.parametrize("counts", HEAD_COUNTS, ids=str)
def test_head_groupings(counts: tuple[int, int]) -> None:
    case = make_case([(5, 1), (20, 9), (0, 3)], heads=(*counts, 8), seed=2)
    for backend in PLAIN_BACKENDS if counts in ((9, 3), (5, 1)) else ("reference",):
        assert_matches(case, backend)


@pytest.mark.long
@pytest.mark.parametrize("counts", HEAD_COUNTS, ids=str)
def test_head_groupings_with_xla(counts: tuple[int, int]) -> None:
    assert_matches(make_case([(5, 1), (20, 9), (0, 3)], heads=(*counts, 128)), "xla")


@pytest.mark.parametrize(
    "page_size",
    [1, 128, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 16, 64, 256))],
)
def test_a_batch_gives_what_single_rows_give_at_any_page_size(page_size: int) -> None:
    rows = [(page_size - 1, 1), (page_size, 1), (0, 30), (2 * page_size + 3, 2)]
    assert_matches(make_case(rows, page_size=page_size), "xla")


@pytest.mark.parametrize("gain", [0.0, 1.0, 8.0])
def test_flat_and_peaked_weights(gain: float) -> None:
    case = make_case(MIXES["decodes and chunks"], **SHAPE, gain=gain)
    for backend in PLAIN_BACKENDS:
        assert_matches(case, backend)


def test_bfloat16_cache_and_queries() -> None:
    low: dict[str, Any] = dict(q_dtype="bfloat16", kv_dtype="bfloat16")
    for backend in PLAIN_BACKENDS:
        assert_matches(make_case([(5, 1), (0, 20)], **low), backend)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), max_size=6),
    seed=st.integers(0, 999),
)
def test_any_mix_matches_oracle(rows: list[tuple[int, int]], seed: int) -> None:
    assert_matches(make_case(rows, **SHAPE, seed=seed), "xla")


def test_documentation_names_tests_that_exist(repo_root: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", (repo_root / "docs" / "attention.md").read_text()))
    sources = [path.read_text() for path in (repo_root / "tests").glob("test_*.py")]
    assert len(named) > 10
    assert [name for name in named if not any(f"def {name}(" in text for text in sources)] == []


BAD = {
    "k_new and v_new": lambda c: (c.q, c.k_new[:-1], c.v_new[:-1], *c.arguments()[3:]),
    "query heads (3)": lambda c: (c.q[:, :3], *c.arguments()[1:]),
    "cache must have 6": lambda c: (*c.arguments()[:3], c.cache[0], *c.arguments()[4:]),
    "page_table has": lambda c: (*c.arguments()[:6], c.kv_lens[:-1], *c.arguments()[7:]),
    "q must not be empty, got shape (0,": lambda c: (c.q[:0], *c.arguments()[1:]),
    "page_table must not be empty": lambda c: (
        *c.arguments()[:5],
        c.page_table[:, :0],
        *c.arguments()[6:],
    ),
    "kv_lens must be an array, got list": lambda c: (
        *c.arguments()[:6],
        c.kv_lens.tolist(),
        *c.arguments()[7:],
    ),
    "differ in dtype": lambda c: (c.q.astype(np.float16), *c.arguments()[1:]),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses_what_does_not_fit(message: str) -> None:
    case = make_case([(5, 1), (0, 20)], num_tokens=32, num_rows=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_paged_attention(*BAD[message](case))
