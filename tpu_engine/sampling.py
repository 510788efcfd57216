"""Sampling on the device: every option is data, rows without it carry its neutral value.

Owns the definition of temperature, top-k, top-p, min-p and of the random key of a token. No
vocabulary is ever sorted: cut-offs are found by bisection on the ordered bits of the logits,
which is exact. Knows no request and no batch layout.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

_BITS = 32


class SamplingRows(NamedTuple):
    """Options of the sampled rows; `temperature` 0 is greedy, 0/1/0 switch the cut-offs off."""

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    seed: UInt[Array, "R"]
    position: Int[Array, "R"]


class Sampled(NamedTuple):
    """Per row: the token, its log-probability under the unmodified logits, all logits finite."""

    token_ids: Int[Array, "R"]
    logprobs: Float[Array, "R"]
    finite: Bool[Array, "R"]


def sample(logits: Float[Array, "R V"], rows: SamplingRows) -> Sampled:
    """Samples one token per row.

    Greedy rows take the first largest logit. Others draw by the Gumbel-max rule from
    softmax(logits / temperature) restricted to, in this order, the `top_k` largest, the smallest
    set of largest whose mass reaches `top_p`, and those of at least `min_p` times the largest
    probability (ties at a cut-off stay in). The key is
    `fold_in(fold_in(key(seed), sample_index), position)` with sample index 0, so a token depends
    on its request alone, not on its batch. The work of drawing is skipped when no row needs it.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = rows.temperature > 0
    drawn = jax.lax.cond(jnp.any(draws), _draw, lambda *_: greedy, logits, rows)
    token_ids = jnp.where(draws, drawn, greedy)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    # logsumexp is NaN or infinite as soon as one logit is NaN or +inf.
    return Sampled(token_ids, chosen - total, jnp.isfinite(total))


def _draw(logits: Float[Array, "R V"], rows: SamplingRows) -> Int[Array, "R"]:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = logits / temperature
    vocab = logits.shape[-1]
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    ordered = _ordered_bits(scaled)
    ones = jnp.ones_like(scaled)
    kept = ordered >= _cutoff(ordered, ones, top_k.astype(jnp.float32))[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    # Rounding may leave the total mass just below 1: top_p = 1 is "off", not a target.
    by_mass = ordered >= _cutoff(ordered, probabilities, rows.top_p)[:, None]
    kept &= by_mass | (rows.top_p >= 1.0)[:, None]
    largest = jnp.max(probabilities, axis=-1, keepdims=True)
    kept &= probabilities >= rows.min_p[:, None] * largest
    noise = jax.vmap(lambda seed, at: _noise(seed, at, vocab))(rows.seed, rows.position)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _noise(seed: UInt[Array, ""], position: Int[Array, ""], vocab: int) -> Float[Array, "V"]:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), position)
    return jax.random.gumbel(key, (vocab,))


def _ordered_bits(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Maps float32 to uint32 so that integer order is float order (-0 just below +0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << (_BITS - 1))
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _cutoff(
    ordered: UInt[Array, "R V"], weights: Float[Array, "R V"], target: Float[Array, "R"]
) -> UInt[Array, "R"]:
    """The largest value c with `sum(weights[ordered >= c]) >= target`; 0 when there is none.

    Built from the top bit down: a bit stays set while the mass at or above it is still enough.
    """

    def try_bit(i: Int[Array, ""], cutoff: UInt[Array, "R"]) -> UInt[Array, "R"]:
        candidate = cutoff | (jnp.uint32(1 << (_BITS - 1)) >> i.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(ordered >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(mass >= target, candidate, cutoff)

    return jax.lax.fori_loop(0, _BITS, try_bit, jnp.zeros(ordered.shape[:1], jnp.uint32))
