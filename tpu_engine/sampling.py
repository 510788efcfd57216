"""Sampling on the device: every option is data, rows without it carry its neutral value.

Owns the definition of temperature, min-p and of the random key of a token; the cut-offs of top-k
and top-p are an op of `kernels.sampling`, and no vocabulary is ever sorted. Knows no request and
no batch layout.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from kernels.sampling import Backend, sampling_cutoffs


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


def sample(logits: Float[Array, "R V"], rows: SamplingRows, backend: Backend = "xla") -> Sampled:
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
    draw = partial(_draw, backend=backend)
    drawn = jax.lax.cond(jnp.any(draws), draw, lambda *_: greedy, logits, rows)
    token_ids = jnp.where(draws, drawn, greedy)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    # logsumexp is NaN or infinite as soon as one logit is NaN or +inf.
    return Sampled(token_ids, chosen - total, jnp.isfinite(total))


def _draw(logits: Float[Array, "R V"], rows: SamplingRows, backend: Backend) -> Int[Array, "R"]:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = logits / temperature
    cutoffs = sampling_cutoffs(scaled, rows.top_k, rows.top_p, backend=backend)
    shares = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))  # of the largest probability
    kept = (scaled >= cutoffs[:, None]) & (shares >= rows.min_p[:, None])
    vocab = logits.shape[-1]
    noise = jax.vmap(lambda seed, at: _noise(seed, at, vocab))(rows.seed, rows.position)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _noise(seed: UInt[Array, ""], position: Int[Array, ""], vocab: int) -> Float[Array, "V"]:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), position)
    return jax.random.gumbel(key, (vocab,))
