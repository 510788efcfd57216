"""Cut-offs of top-k and top-p: every backend keeps the tokens the sorting reference keeps."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.sampling import BACKENDS, sampling_cutoffs
from kernels.sampling.ordered import LOWEST, NUM_BITS, float_of, try_bit

SEARCHING = ("xla", "pallas-interpret")
ROW_OPTIONS = [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.9), (40, 0.5), (7, 0.0), (3, 0.999), (0, 0.1)]


def cutoffs(logits: np.ndarray, options: list[tuple[int, float]], backend: str) -> np.ndarray:
    top_k = np.array([k for k, _ in options], np.int32)
    top_p = np.array([p for _, p in options], np.float32)
    op = jax.jit(sampling_cutoffs, static_argnames="backend")
    return np.asarray(op(logits, top_k, top_p, backend=backend))


def oracle_count(logits: np.ndarray, top_k: int, top_p: float) -> int:
    """How many stay, in float64, for distinct logits."""
    ordered = np.sort(logits.astype(np.float64))[::-1][: top_k or None]
    mass = np.exp(ordered - ordered[0])
    reached = np.cumsum(mass) / mass.sum() >= top_p
    return len(ordered) if top_p >= 1 else int(np.argmax(reached)) + 1


@pytest.mark.parametrize("backend", BACKENDS[:2] + BACKENDS[3:])
@pytest.mark.parametrize(("num_rows", "vocab"), [(8, 4096), (3, 5000), (11, 130)])
def test_keeps_the_tokens_the_rule_names(backend: str, num_rows: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(scale=4, size=(num_rows, vocab)).astype(np.float32)
    options = [ROW_OPTIONS[i % len(ROW_OPTIONS)] for i in range(num_rows)]
    found = cutoffs(logits, options, backend)
    kept = (logits >= found[:, None]).sum(axis=1)
    assert kept.tolist() == [oracle_count(r, *o) for r, o in zip(logits, options, strict=True)]


@pytest.mark.parametrize("backend", SEARCHING)
def test_ties_infinities_and_signs_keep_what_the_reference_keeps(backend: str) -> None:
    rows = np.array(
        [
            [1, 2, 2, 2, 0, -1, -3, -4],
            [-5, -5, -5, -6, -7, -np.inf, -np.inf, -np.inf],
            [0.0, -0.0, 1e-30, -1e-30, -1, -2, -3, -4],
            [-np.inf, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf, 3],
        ],
        np.float32,
    )
    for option in [(2, 1.0), (3, 0.7), (0, 0.5), (1, 0.1), (8, 1.0)]:
        options = [option] * len(rows)
        expected = rows >= cutoffs(rows, options, "reference")[:, None]
        kept = rows >= cutoffs(rows, options, backend)[:, None]
        np.testing.assert_array_equal(kept, expected, err_msg=str(option))


@pytest.mark.parametrize("backend", SEARCHING)
def test_a_row_does_not_depend_on_its_companions(backend: str) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=3, size=(9, 700)).astype(np.float32)
    logits[1] = np.nan
    options = (ROW_OPTIONS * 2)[:9]
    together = cutoffs(logits, options, backend)
    for i in (0, 3, 8):
        alone = cutoffs(logits[i : i + 1], [options[i]], backend)
        np.testing.assert_array_equal(alone[0], together[i])


def test_the_walk_over_bits_reaches_every_number() -> None:
    numbers = np.array([-np.inf, -1e30, -1.5, -1e-30, 0.0, 1e-30, 1.5, 1e30], np.float32)
    for number in numbers:
        found = jnp.int32(LOWEST)
        for i in range(NUM_BITS):
            candidate = try_bit(found, jnp.int32(i))
            if float_of(candidate) <= number:
                found = candidate
        assert float_of(found) == number


def test_wrong_arrays_are_refused_by_name() -> None:
    logits, top_k, top_p = jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    with pytest.raises(ValueError, match=re.escape("[R, V] and not empty, got float16")):
        sampling_cutoffs(logits.astype(jnp.float16), top_k, top_p)
    with pytest.raises(ValueError, match=re.escape("[R, V] and not empty, got float32 (2, 0)")):
        sampling_cutoffs(logits[:, :0], top_k, top_p)
    with pytest.raises(ValueError, match=re.escape("top_k must be one number per row (2,)")):
        sampling_cutoffs(logits, top_k[:1], top_p)
    with pytest.raises(ValueError, match="backend must be one of reference, xla"):
        sampling_cutoffs(logits, top_k, top_p, backend="cuda")  # pyright: ignore
