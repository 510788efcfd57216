"""How one weight of a model is shaped, sharded and read: the entry type of a family's table.

Owns the description only. Doesn't know files (a `TensorSource` is passed in) nor any family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tpu_engine.weights.source import TensorSource

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight, without its leading layer axis where `stacked`.

    Attributes:
        shape, axes: sizes and logical axis names; output axes first, then `num_in` input axes.
        num_in: trailing axes a matmul contracts; 0 for a weight that isn't a matmul.
        tensors: names and shapes of the checkpoint tensors it is made of, for layer `{layer}`.
        read: builds `shape[index]` of one layer (index over the unstacked axes) as float32 or the
            checkpoint's dtype from a source and a layer number.
        stacked: whether every layer has one; stacked weights carry a leading axis `layers`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_in: int
    tensors: Mapping[str, tuple[int, ...]]
    read: Callable[[TensorSource, int, Index], np.ndarray]
    stacked: bool = True


def expected_tensors(
    specs: Mapping[str, WeightSpec], num_layers: int
) -> dict[str, tuple[int, ...]]:
    """Returns every checkpoint tensor the table reads, with its shape."""
    expected: dict[str, tuple[int, ...]] = {}
    for spec in specs.values():
        for layer in range(num_layers if spec.stacked else 1):
            for name, shape in spec.tensors.items():
                expected[name.format(layer=layer)] = shape
    return expected


def plain(
    name: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    num_in: int = 0,
    stacked: bool = True,
    file_shape: tuple[int, ...] | None = None,
) -> WeightSpec:
    """A weight that is one checkpoint tensor, possibly with its axes split (`file_shape` joined).

    Only the first axis is read in part; the others are cut after reading.
    """
    file_shape = shape if file_shape is None else file_shape

    def read(source: TensorSource, layer: int, index: Index) -> np.ndarray:
        tensor_name = name.format(layer=layer)
        if shape == file_shape:
            rows = source.read(tensor_name, index[:1])
            return rows[(slice(None), *index[1:])]
        return source.read(tensor_name, None).reshape(shape)[index]

    return WeightSpec(shape, axes, num_in, {name: file_shape}, read, stacked)
