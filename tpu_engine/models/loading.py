"""Puts a checkpoint's tensors where the mesh wants them, one weight at a time.

Owns the way from a `TensorSource` and a family's weight table to device arrays, float or int8.
Knows no file format and no forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpu_engine.models.layers import quantize_weight
from tpu_engine.models.sharding import sharding
from tpu_engine.models.weights_spec import Index, WeightSpec
from tpu_engine.weights.source import TensorSource

OnWeight = Callable[[str, int, int], None]


def load_weights(
    abstract: nnx.State,
    specs: Mapping[str, WeightSpec],
    source: TensorSource,
    mesh: Mesh,
    on_weight: OnWeight,
) -> nnx.State:
    """Returns the state `abstract` describes, filled from `source` and sharded over `mesh`.

    Each device's part is read on its own, so the host holds one stacked weight at a time.
    `on_weight(name, done, total)` is called after each.
    """
    flat = list(nnx.to_flat_state(abstract))
    halves: dict[str, _QuantizedParts] = {}
    loaded = []
    places = [
        sharding(mesh, variable.get_metadata()["logical_axes"], variable.get_value().shape)
        for _, variable in flat
    ]  # all of them first: a mesh that doesn't fit is refused before anything is read
    for done, ((path, variable), place) in enumerate(zip(flat, places, strict=True), start=1):
        owner, leaf = ("", *(str(part) for part in path))[-2:]
        name = owner if leaf in ("kernel", "scale") else leaf
        target = variable.get_value()
        if target.dtype == np.int8 or leaf == "scale":
            parts = halves.setdefault(name, _QuantizedParts(specs[name], source))
            read = parts.kernel if leaf == "kernel" else parts.scale
        else:
            read = _float_parts(specs[name], source, target.dtype)
        shards = jax.make_array_from_callback(target.shape, place, _whole(read, target.shape))
        loaded.append((path, variable.replace(shards)))
        on_weight(name, done, len(flat))
    return nnx.from_flat_state(loaded)


def _whole(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...]
) -> Callable[[Index | None], np.ndarray]:
    """Makes the indices JAX passes explicit: every slice with its start and stop."""

    def explicit(index: Index | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        parts = (slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
        return read(tuple(parts))

    return explicit


def _layers(spec: WeightSpec, index: Index) -> tuple[range, Index]:
    """Splits an index into layer numbers and the index within a layer."""
    if spec.stacked:
        return range(index[0].start, index[0].stop), index[1:]
    return range(1), index


def _float_parts(
    spec: WeightSpec, source: TensorSource, dtype: np.dtype
) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        layers, within = _layers(spec, index)
        out = np.empty((len(layers), *(s.stop - s.start for s in within)), dtype)
        for i, layer in enumerate(layers):
            out[i] = spec.read(source, layer, within)
        return out if spec.stacked else out[0]

    return read


class _QuantizedParts:
    """int8 parts and scales of one weight; each output row is read and rounded once per shard."""

    def __init__(self, spec: WeightSpec, source: TensorSource) -> None:
        self._spec = spec
        self._source = source
        self._scales: dict[str, np.ndarray] = {}

    def kernel(self, index: Index) -> np.ndarray:
        layers, within = _layers(self._spec, index)
        outputs, inputs = within[: -self._spec.num_in], within[-self._spec.num_in :]
        kernel = np.empty((len(layers), *(s.stop - s.start for s in within)), np.int8)
        scales = np.empty((len(layers), *(s.stop - s.start for s in outputs)), np.float32)
        for i, layer in enumerate(layers):
            rounded, scales[i] = self._rounded(layer, outputs)
            kernel[i] = rounded[(..., *inputs)]
        self._scales[str(index[: -self._spec.num_in])] = scales
        return kernel if self._spec.stacked else kernel[0]

    def scale(self, index: Index) -> np.ndarray:
        scales = self._scales.get(str(index))
        if scales is None:  # sharded otherwise than the kernel
            layers, outputs = _layers(self._spec, index)
            scales = np.stack([self._rounded(layer, outputs)[1] for layer in layers])
        return scales if self._spec.stacked else scales[0]

    def _rounded(self, layer: int, outputs: Index) -> tuple[np.ndarray, np.ndarray]:
        sizes = self._spec.shape[-self._spec.num_in :]
        whole = (*outputs, *(slice(0, size) for size in sizes))
        return quantize_weight(self._spec.read(self._source, layer, whole), self._spec.num_in)
