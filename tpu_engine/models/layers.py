"""Layers shared by the model families: dense (float or int8 weights), RMS norm, rotary embedding.

Owns how a stored weight becomes a matmul. Pure functions and small modules; knows no family,
no cache, no batch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tpu_engine.models.weights_spec import WeightSpec

_FINE_STEPS = 254.0  # the rest of a rounding lies within +-1/2: times 254 it fills int8


_MOST_INTEGER_ROWS = 64  # beyond, one float matmul is faster than the integer one of twice the rows


def weight_param(spec: WeightSpec, num_layers: int, dtype: jnp.dtype) -> nnx.Param:
    """An unloaded parameter with its logical axes; allocate only under `nnx.eval_shape`."""
    lead, lead_axes = ((num_layers,), ("layers",)) if spec.stacked else ((), ())
    return nnx.Param(jnp.zeros((*lead, *spec.shape), dtype), logical_axes=(*lead_axes, *spec.axes))


class Dense(nnx.Module):
    """`y = x W^T` over the spec's input axes: `[T, *in] -> [T, *out]`.

    With `quantized`, W is int8 with one scale per output; activations stay as good as exact (see
    `int8_planes`), so the error is that of the weights' rounding alone.
    """

    def __init__(
        self, spec: WeightSpec, num_layers: int, dtype: jnp.dtype, *, quantized: bool
    ) -> None:
        self.num_in = spec.num_in
        self.kernel = weight_param(spec, num_layers, jnp.dtype(jnp.int8) if quantized else dtype)
        scales = weight_param(output_axes(spec), num_layers, jnp.dtype(jnp.float32))
        self.scale = nnx.data(scales if quantized else None)

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        kernel = self.kernel[...]
        out_shape = kernel.shape[: -self.num_in]
        flat_x = x.reshape(x.shape[0], -1)
        flat_kernel = kernel.reshape(math.prod(out_shape), -1)
        if self.scale is None:
            y = matmul_transposed(flat_x, flat_kernel, x.dtype)
        else:
            y = matmul_int8(flat_x, flat_kernel) * self.scale[...].reshape(-1)
            y = y.astype(x.dtype)
        return y.reshape(x.shape[0], *out_shape)


def output_axes(spec: WeightSpec) -> WeightSpec:
    """The spec of a quantised weight's scales: the same weight without its input axes."""
    kept = len(spec.shape) - spec.num_in
    return WeightSpec(spec.shape[:kept], spec.axes[:kept], 0, {}, spec.read, spec.stacked)


def matmul_transposed(
    x: Float[Array, "T I"], w: Float[Array, "O I"], dtype: DTypeLike
) -> Float[Array, "T O"]:
    """`x w^T` accumulated and returned in `dtype`."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def matmul_int8(x: Float[Array, "T I"], w: Int[Array, "O I"]) -> Float[Array, "T O"]:
    """`x w^T` for an int8 `w`, in float32: whatever way is fastest on the platform lowered for."""
    return jax.lax.platform_dependent(x, w, cpu=_matmul_int8_cpu, default=_matmul_dequantized)


def _matmul_dequantized(x: Float[Array, "T I"], w: Int[Array, "O I"]) -> Float[Array, "T O"]:
    return matmul_transposed(x, w.astype(x.dtype), jnp.float32)


def _matmul_int8_cpu(x: Float[Array, "T I"], w: Int[Array, "O I"]) -> Float[Array, "T O"]:
    """XLA CPU has a fast int8 matmul and a slow conversion, which few rows don't amortise."""
    if x.shape[0] > _MOST_INTEGER_ROWS:
        return _matmul_dequantized(x.astype(jnp.float32), w)
    planes, scale = int8_planes(x)
    exact = matmul_transposed(planes, w, jnp.int32).astype(jnp.float32)
    coarse, fine = jnp.split(exact, 2)
    return (coarse + fine * (1 / _FINE_STEPS)) * scale


def int8_planes(x: Float[Array, "T I"]) -> tuple[Int[Array, "2T I"], Float[Array, "T 1"]]:
    """Writes each row as `scale * (coarse + fine / 254)`, all coarse rows first, then all fine.

    Both planes are int8 and the scale belongs to one row, so a row is exact to 1/64516 of its
    largest value whatever rows stand beside it, and integer matmuls of it round nowhere.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-12) / 127.0
    steps = x * (1 / scale)
    coarse = jnp.round(steps)
    fine = jnp.round((steps - coarse) * _FINE_STEPS)
    return jnp.concatenate([coarse, fine]).astype(jnp.int8), scale


def quantize_weight(w: np.ndarray, num_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a weight to int8 per output (all but the last `num_in` axes), on the host.

    Returns the integers, shaped as `w`, and float32 scales, shaped as the output axes.
    """
    axes = tuple(range(w.ndim - num_in, w.ndim))
    w = w.astype(np.float32)
    scale = np.maximum(np.abs(w).max(axis=axes, keepdims=True), np.float32(1e-12)) / 127
    return np.rint(w / scale).astype(np.int8), np.squeeze(scale, axis=axes)


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "T D"]:
    """Root mean square norm (arXiv:1910.07467), computed in float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * weight.astype(jnp.float32)).astype(x.dtype)


def rope_angles(
    positions: Int[Array, "T"], inverse_frequencies: tuple[float, ...]
) -> tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]]:
    """Cosines and sines of every token's rotation, shared by all layers."""
    frequencies = np.array(inverse_frequencies, np.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T N H"], cos: Float[Array, "T 1 H2"], sin: Float[Array, "T 1 H2"]
) -> Float[Array, "T N H"]:
    """Rotary embedding (arXiv:2104.09864), halves of the head paired."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
