"""Static scales of an 8-bit KV cache: what is stored is `round(x / scale)`, read back `* scale`.

Owns rounding and saturation. Scales are constants of a layer and head, never of a step, so what is
stored does not depend on how a prompt was split. No backend sees a scale: those of K are folded
into the queries, those of V into the output.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

INT8_LIMIT = 127  # -128 is left out: the range is symmetric, as in the scale's calibration


def is_quantized(dtype: jnp.dtype) -> bool:
    """True for cache dtypes that scales apply to."""
    return dtype in (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def to_cache_dtype(
    x: Float[Array, "T K H"], dtype: jnp.dtype, scale: Float[Array, "K"] | None
) -> Array:
    """Divides by the head's scale, rounds half to even and saturates; NaN stays NaN in floats."""
    if not is_quantized(dtype):
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    if scale is not None:
        wide = wide / scale[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(wide), -INT8_LIMIT, INT8_LIMIT).astype(dtype)
    limit = float(jnp.finfo(dtype).max)  # beyond it the cast of e4m3fn would yield NaN
    return jnp.clip(wide, -limit, limit).astype(dtype)


def scale_heads(x: Float[Array, "T N H"], scale: Float[Array, "K"] | None) -> Float[Array, "T N H"]:
    """Multiplies each query head by its KV head's scale, in float32; None leaves `x` alone."""
    if scale is None:
        return x
    per_head = jnp.repeat(scale, x.shape[1] // scale.shape[0])
    return x.astype(jnp.float32) * per_head[:, None]
