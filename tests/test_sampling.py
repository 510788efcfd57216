"""Sampling on the device: cut-offs against a plain NumPy rule, randomness by seed and position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_engine.sampling import SamplingRows, sample

VOCAB = 50
ROWS = 4
jitted = jax.jit(sample)


def rows(**options: object) -> SamplingRows:
    neutral = {
        "temperature": np.float32(1),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "seed": np.uint32(0),
        "position": np.int32(0),
    }
    values = neutral | options
    return SamplingRows(
        *(
            jnp.broadcast_to(jnp.asarray(values[name], neutral[name].dtype), ROWS)
            for name in SamplingRows._fields
        )
    )


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32) * 2


def allowed(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn: the rule in words, by sorting."""
    order = np.argsort(-row, kind="stable")
    kept = list(order[: top_k or VOCAB])
    weights = np.exp(row[kept].astype(np.float64) - row.max())
    weights /= weights.sum()
    if top_p < 1:
        # The smallest set of largest whose mass reaches top_p.
        kept = kept[: int(np.searchsorted(np.cumsum(weights), top_p)) + 1]
    return {int(i) for w, i in zip(weights, kept, strict=False) if w >= min_p * weights[0]}


def draws(row_logits: np.ndarray, num_seeds: int = 300, **options: object) -> list[set[int]]:
    seen: list[set[int]] = [set() for _ in range(ROWS)]
    for first in range(0, num_seeds, ROWS):
        for row in range(ROWS):  # the same logits in every row, other seeds
            repeated = np.broadcast_to(row_logits[row], (ROWS, VOCAB))
            seeds = np.arange(first, first + ROWS)
            seen[row] |= set(np.asarray(jitted(repeated, rows(seed=seeds, **options)).token_ids))
    return seen


def test_greedy_takes_the_first_largest() -> None:
    values = np.zeros((ROWS, VOCAB), np.float32)
    values[1, 7] = 1
    values[2, 3] = values[2, 9] = 5
    result = jitted(values, rows(temperature=0))
    assert result.token_ids.tolist() == [0, 7, 3, 0]
    expected = [-np.log(VOCAB), 1 - np.log(VOCAB - 1 + np.e)]
    np.testing.assert_allclose(result.logprobs[:2], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1, 0), (5, 1, 0), (0, 0.5, 0), (0, 0.01, 0), (0, 1, 0.3), (6, 0.7, 0.1), (VOCAB, 1, 0)],
)
def test_draws_exactly_the_allowed_tokens(top_k: int, top_p: float, min_p: float) -> None:
    values = logits()
    seen = draws(values, top_k=top_k, top_p=top_p, min_p=min_p)
    for row in range(ROWS):
        may = allowed(values[row], top_k, top_p, min_p)
        assert seen[row] <= may
        if len(may) <= 6:
            likely = {i for i in may if values[row, i] > values[row].max() - 2.0}
            assert likely <= seen[row]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_never_leaves_the_allowed_set(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    values = logits(seed)
    result = jitted(values, rows(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed))
    for row, token in enumerate(np.asarray(result.token_ids)):
        # A hair of slack in top_p and min_p: float32 sums against float64.
        slack = allowed(values[row], top_k, min(1.0, top_p + 1e-5), max(0.0, min_p - 1e-5))
        assert int(token) in slack


def test_draws_follow_the_distribution() -> None:
    values = np.broadcast_to(np.log([0.5, 0.3, 0.2]).astype(np.float32), (2000, 3))
    many = SamplingRows(
        jnp.full(2000, 1, jnp.float32),
        jnp.zeros(2000, jnp.int32),
        jnp.ones(2000, jnp.float32),
        jnp.zeros(2000, jnp.float32),
        jnp.arange(2000, dtype=jnp.uint32),
        jnp.full(2000, 17, jnp.int32),
    )
    counts = np.bincount(np.asarray(jitted(values, many).token_ids), minlength=3)
    np.testing.assert_allclose(counts / 2000, [0.5, 0.3, 0.2], atol=0.04)


def test_token_depends_on_seed_and_position_not_on_row() -> None:
    values = np.broadcast_to(logits()[0], (ROWS, VOCAB))
    same = jitted(values, rows(seed=5, position=9)).token_ids.tolist()
    assert len(set(same)) == 1
    by_position = {
        tuple(jitted(values, rows(seed=5, position=p)).token_ids.tolist()) for p in range(12)
    }
    assert len(by_position) > 3
    mixed = jitted(values, rows(seed=[1, 5, 2, 3], position=[4, 9, 9, 1])).token_ids
    assert int(mixed[1]) == same[0]


def test_greedy_rows_are_untouched_by_drawing_companions() -> None:
    values = logits(3)
    alone = jitted(values, rows(temperature=0)).token_ids
    mixed = jitted(values, rows(temperature=[0, 1.5, 0, 0.7], seed=11)).token_ids
    assert int(mixed[0]) == int(alone[0])
    assert int(mixed[2]) == int(alone[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_are_reported_for_their_row_alone(bad: float) -> None:
    values = logits()
    values[2, 4] = bad
    result = jitted(values, rows(temperature=0))
    assert result.finite.tolist() == [True, True, False, True]
