"""The op: per row the smallest logit that top-k and top-p leave in, without sorting a vocabulary.

Owns the contract, the reference (which does sort) and the XLA backend. Both backends search the
cut-off bit by bit in an order of the float32 bits that is the order of the numbers, so the count
of kept logits is exact. Knows no temperature, no randomness and no request.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.sampling.ordered import LOWEST, NUM_BITS, float_of, try_bit
from kernels.sampling.pallas import pallas_cutoffs

Backend = Literal["reference", "xla", "pallas", "pallas-interpret"]
BACKENDS: tuple[str, ...] = ("reference", "xla", "pallas", "pallas-interpret")


def sampling_cutoffs(
    logits: Float[Array, "R V"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
    *,
    backend: Backend = "xla",
) -> Float[Array, "R"]:
    """The cut-off of each row: a token stays in the draw if its logit is at least that.

    First the `top_k` largest stay (0, or V and more: all), then, of those, the smallest set of
    largest, at least one, whose share of their softmax mass reaches `top_p` (1 and more: all).
    Ties at the cut-off stay. -inf where all stay; arbitrary for a row with NaN.

    Raises:
        ValueError: logits that are not float32 `[R, V]`, options that are not `[R]`, or an unknown
            backend, each named.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32 or not logits.size:
        raise ValueError(
            f"logits must be float32 [R, V] and not empty, got {logits.dtype} {logits.shape}"
        )
    rows = logits.shape[:1]
    for name, option in (("top_k", top_k), ("top_p", top_p)):
        if option.shape != rows:
            raise ValueError(f"{name} must be one number per row {rows}, got {option.shape}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    vocab = logits.shape[1]
    top_k = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
    if backend == "reference":
        return reference_cutoffs(logits, top_k, top_p)
    if backend == "xla":
        return xla_cutoffs(logits, top_k, top_p)
    return pallas_cutoffs(logits, top_k, top_p, interpret=backend == "pallas-interpret")


def reference_cutoffs(
    logits: Float[Array, "R V"], top_k: Int[Array, "R"], top_p: Float[Array, "R"]
) -> Float[Array, "R"]:
    """The definition, by sorting; `top_k` is within 1 .. V."""
    descending = -jnp.sort(-logits, axis=-1)
    nth_largest = jnp.take_along_axis(descending, top_k[:, None] - 1, axis=-1)
    nth_largest = jnp.where(top_k[:, None] < logits.shape[1], nth_largest, -jnp.inf)
    mass = jax.nn.softmax(jnp.where(descending >= nth_largest, descending, -jnp.inf), axis=-1)
    reached = jnp.cumsum(mass, axis=-1) >= top_p[:, None]
    last = jnp.where(reached.any(axis=-1), jnp.argmax(reached, axis=-1), -1)
    by_mass = jnp.take_along_axis(descending, last[:, None], axis=-1)
    by_mass = jnp.where(top_p[:, None] >= 1, -jnp.inf, by_mass)
    return jnp.maximum(nth_largest, by_mass)[:, 0]


def xla_cutoffs(
    logits: Float[Array, "R V"], top_k: Int[Array, "R"], top_p: Float[Array, "R"]
) -> Float[Array, "R"]:
    """Two bisections as XLA loops: one on the count, one on the mass; `top_k` is within 1 .. V."""
    nth_largest = _search(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))
    nth_largest = jnp.where(top_k < logits.shape[1], nth_largest, -jnp.inf)
    kept = jnp.where(logits >= nth_largest[:, None], logits, -jnp.inf)
    by_mass = _search(logits, jax.nn.softmax(kept, axis=-1), top_p)
    # Rounding may leave the total mass just below 1: top_p = 1 is "off", not a target.
    return jnp.maximum(nth_largest, jnp.where(top_p >= 1, -jnp.inf, by_mass))


def _search(
    logits: Float[Array, "R V"], weights: Float[Array, "R V"], target: Float[Array, "R"]
) -> Float[Array, "R"]:
    """The largest c with `sum(weights[logits >= c]) >= target`; -inf when there is none."""

    def one_bit(i: Int[Array, ""], found: Int[Array, "R"]) -> Int[Array, "R"]:
        candidate = try_bit(found, i)
        inside = logits >= float_of(candidate)[:, None]
        mass = jnp.sum(jnp.where(inside, weights, 0.0), axis=-1)
        return jnp.where(mass >= target, candidate, found)

    lowest = jnp.full(target.shape, LOWEST, jnp.int32)
    return float_of(jax.lax.fori_loop(0, NUM_BITS, one_bit, lowest))
