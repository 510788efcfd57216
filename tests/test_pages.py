"""Gather and scatter of whole pages: every backend moves the same bytes, and nothing else."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.pages import BACKENDS, gather_pages, scatter_pages

RUNNABLE = tuple(name for name in BACKENDS if name != "pallas")
SHAPES = {"two planes": (3, 6, 2, 1, 16, 128), "latent": (2, 6, 1, 1, 16, 256)}
DTYPES = ["bfloat16", "float32", "int8", "float8_e4m3fn"]


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    bits = np.random.default_rng(seed).integers(-100, 100, size=shape)
    return jnp.asarray(bits).astype(dtype)


def as_float(array: jax.Array) -> np.ndarray:
    return np.array(array.astype(jnp.float32))


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_gathered_and_scattered_pages_are_exact(name: str, dtype: str, backend: str) -> None:
    cache = random_bits(SHAPES[name], dtype, 1)
    pages = jnp.array([4, 0, 2], jnp.int32)
    block = jax.jit(gather_pages, static_argnames="backend")(cache, pages, backend=backend)
    np.testing.assert_array_equal(as_float(block), as_float(cache)[:, [4, 0, 2]])

    target = random_bits(SHAPES[name], dtype, 2)
    expected = as_float(target)
    to = jnp.array([1, 5, 3], jnp.int32)
    scatter = jax.jit(scatter_pages, static_argnames="backend", donate_argnums=0)
    written = scatter(target, to, block, backend=backend)
    expected[:, [1, 5, 3]] = as_float(block)
    np.testing.assert_array_equal(as_float(written), expected)


def test_what_does_not_fit_is_refused_by_name() -> None:
    cache, pages = jnp.zeros((2, 4, 2, 1, 16, 128)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=re.escape("[n] and not empty, got float32 (3,)")):
        gather_pages(cache, pages.astype(jnp.float32))
    with pytest.raises(ValueError, match=re.escape("[n] and not empty, got int32 (0,)")):
        gather_pages(cache, pages[:0])
    with pytest.raises(ValueError, match=re.escape("cache must be [L, P, ...]")):
        gather_pages(cache[0, 0, 0], pages)
    with pytest.raises(ValueError, match=r"block must be float32 .*got bfloat16"):
        scatter_pages(cache, pages, jnp.zeros((2, 3, 2, 1, 16, 128), jnp.bfloat16))
    with pytest.raises(ValueError, match="backend must be one of xla"):
        gather_pages(cache, pages, backend="cuda")  # pyright: ignore
