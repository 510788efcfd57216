"""An order on int32 that is the order of float32: what the bisection walks over.

Owns the mapping and how one bit of a cut-off is tried. Knows no logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NUM_BITS = 32
LOWEST = -(1 << 31)  # below every number, -inf included
_MAGNITUDE = 0x7FFFFFFF
_MINUS_INF = -0x7F800001  # where -inf lies in the order; below it lie NaNs


def float_of(ordered: Int[Array, "..."]) -> Float[Array, "..."]:
    """The float32 at a place of the order; places below -inf give -inf, above +inf NaN.

    Subnormal numbers give 0: devices compare them as such.
    """
    ordered = jnp.maximum(ordered, jnp.int32(_MINUS_INF))
    flipped = jnp.where(ordered < 0, ordered ^ jnp.int32(_MAGNITUDE), ordered)
    number = jax.lax.bitcast_convert_type(flipped, jnp.float32)
    return jnp.where(jnp.abs(number) < jnp.finfo(jnp.float32).tiny, 0.0, number)


def try_bit(found: Int[Array, "..."], i: Int[Array, ""]) -> Int[Array, "..."]:
    """`found` with its i-th bit from the top raised; the sign bit counts the other way round."""
    bit = jax.lax.shift_right_logical(jnp.int32(LOWEST), i.astype(jnp.int32))
    return found ^ bit  # the bit is clear in `found`, or set if it is the sign
