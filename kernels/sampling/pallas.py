"""The cut-off search as a TPU kernel: a block of rows stays in VMEM for all passes.

XLA's loop reads the logits again for each of its 64 passes at some 7 cycles per vector register;
here a pass is about one. Pipeline, per block of eight rows:

    HBM --(next block's logits arrive meanwhile)--> VMEM [8, V]
      count search:  32 x sum(logits >= c)             skipped where no row asks for top-k
      weights:       exp(logits - max) of what is left  \\
      mass search:   32 x sum(weights, logits >= c)      skipped where no row asks for top-p

Knows no backend choice; the contract is in `kernels.sampling.cutoffs`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.sampling.ordered import LOWEST, NUM_BITS, float_of, try_bit

ROWS = 8  # sublanes of a vector register: one row each, so a sum over lanes is a row's sum
STRIDE = 4096  # lanes per turn of a pass: 32 registers hide the latency of loads and adds
ACCUMULATORS = 1024  # lanes that are summed apart, so that additions don't wait for each other
LANES = 128
Lanes = slice | pl.Slice
SMALL_BLOCK_BYTES = 1 << 20  # what a kernel needs of VMEM besides logits and weights


def pallas_cutoffs(
    logits: Float[Array, "R V"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
    *,
    interpret: bool = False,
) -> Float[Array, "R"]:
    """Same as `xla_cutoffs`; needs `vmem_bytes(V)` of VMEM."""
    num_rows, vocab = logits.shape
    more_rows, more_lanes = -num_rows % ROWS, -vocab % STRIDE
    padded = jnp.pad(logits, ((0, more_rows), (0, more_lanes)), constant_values=-jnp.inf)
    counts = jnp.pad(top_k.astype(jnp.float32), (0, more_rows), constant_values=vocab)
    masses = jnp.pad(top_p, (0, more_rows), constant_values=1.0)

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((ROWS, width), lambda i: (i, 0))

    found = pl.pallas_call(
        lambda *refs: _search_block(*refs, vocab=vocab),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], 1), jnp.float32),
        grid=(padded.shape[0] // ROWS,),
        in_specs=[rows(1), rows(1), rows(padded.shape[1])],
        out_specs=rows(1),
        scratch_shapes=[pltpu.VMEM((ROWS, padded.shape[1]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_bytes(vocab),
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * NUM_BITS * 3 * padded.size,
            bytes_accessed=padded.size * 4,
            transcendentals=padded.size,
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="sampling_cutoffs",
    )(counts[:, None], masses[:, None], padded)
    return found[:num_rows, 0]


def vmem_bytes(vocab: int) -> int:
    """VMEM of one call: two buffers of eight rows of logits, their weights, and small change."""
    return 3 * ROWS * (vocab + -vocab % STRIDE) * 4 + SMALL_BLOCK_BYTES


def _search_block(
    counts_ref: Float[Array, "8 1"],
    masses_ref: Float[Array, "8 1"],
    logits_ref: Float[Array, "8 V"],
    found_ref: Float[Array, "8 1"],
    weights_ref: Float[Array, "8 V"],
    *,
    vocab: int,
) -> None:
    counts, masses = counts_ref[:], masses_ref[:]
    found_ref[:] = jnp.full((ROWS, 1), -jnp.inf, jnp.float32)

    @pl.when(jnp.any(counts < vocab))
    def _by_count() -> None:
        nth_largest = _search(
            logits_ref.shape[1],
            counts,
            lambda c, at: jnp.where(logits_ref[:, at] >= c, 1.0, 0.0),
        )
        found_ref[:] = jnp.where(counts < vocab, nth_largest, -jnp.inf)

    @pl.when(jnp.any(masses < 1.0))
    def _by_mass() -> None:
        nth_largest = found_ref[:]
        total = _weigh(logits_ref, nth_largest, weights_ref)
        by_mass = _search(
            logits_ref.shape[1],
            masses * total,
            lambda c, at: jnp.where(logits_ref[:, at] >= c, weights_ref[:, at], 0.0),
        )
        found_ref[:] = jnp.where(masses < 1.0, jnp.maximum(nth_largest, by_mass), nth_largest)


def _weigh(
    logits_ref: Float[Array, "8 V"], lowest: Float[Array, "8 1"], weights_ref: Float[Array, "8 V"]
) -> Float[Array, "8 1"]:
    """Writes `exp(logit - largest)` of logits from `lowest` on, 0 elsewhere; returns the sums."""
    width = logits_ref.shape[1]
    largest = _fold(width, -jnp.inf, jnp.maximum, lambda at: logits_ref[:, at])
    largest = jnp.max(largest, axis=-1, keepdims=True)

    def weigh(at: Lanes) -> Float[Array, "8 A"]:
        logits = logits_ref[:, at]
        weights = jnp.where(logits >= lowest, jnp.exp(logits - largest), 0.0)
        weights_ref[:, at] = weights
        return weights

    return jnp.sum(_fold(width, 0.0, jnp.add, weigh), axis=-1, keepdims=True)


def _search(
    width: int,
    target: Float[Array, "8 1"],
    weights_from: Callable[[Float[Array, "8 1"], Lanes], Float[Array, "8 A"]],
) -> Float[Array, "8 1"]:
    """Bisects, per row, the largest c whose weights from c on sum to the target."""

    def one_bit(i: Int[Array, ""], found: Int[Array, "8 1"]) -> Int[Array, "8 1"]:
        candidate = try_bit(found, i)
        c = float_of(candidate)
        partial = _fold(width, 0.0, jnp.add, lambda at: weights_from(c, at))
        mass = jnp.sum(partial, axis=-1, keepdims=True)
        return jnp.where(mass >= target, candidate, found)

    lowest = jnp.full((ROWS, 1), LOWEST, jnp.int32)
    return float_of(jax.lax.fori_loop(0, NUM_BITS, one_bit, lowest))


def _fold(
    width: int,
    start: float,
    combine: Callable[[Array, Array], Array],
    value_at: Callable[[Lanes], Float[Array, "8 A"]],
) -> Float[Array, "8 A"]:
    """Combines `value_at` of all lane slices, ACCUMULATORS lanes wide."""

    def turn(i: Int[Array, ""], folded: Float[Array, "8 A"]) -> Float[Array, "8 A"]:
        for offset in range(0, STRIDE, ACCUMULATORS):
            at = pl.multiple_of(i * STRIDE + offset, LANES)
            folded = combine(folded, value_at(pl.ds(at, ACCUMULATORS)))
        return folded

    shape = (ROWS, ACCUMULATORS)
    return jax.lax.fori_loop(0, width // STRIDE, turn, jnp.full(shape, start, jnp.float32))
