"""Logical axis names and the one table that maps them to mesh axes.

Owns the rules and the mesh of one engine. Knows no model: models name their axes, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_engine.errors import InvalidConfig

TENSOR = "tensor"

AXIS_RULES: Mapping[str, str | None] = {
    "layers": None,
    "vocab": TENSOR,
    "embed": None,
    "kv_heads": TENSOR,
    "heads_per_kv": None,
    "head_dim": None,
    "gate_up": None,
    "ffn": TENSOR,
}


def make_mesh(tensor_parallel: int, devices: list[Any] | None = None) -> Mesh:
    """Returns a one-axis mesh of the first `tensor_parallel` devices."""
    devices = jax.devices() if devices is None else devices
    if tensor_parallel > len(devices):
        raise InvalidConfig(
            "tensor_parallel", f"at most the {len(devices)} devices here", tensor_parallel
        )
    return Mesh(np.array(devices[:tensor_parallel]), (TENSOR,))


def partition(axes: tuple[str, ...]) -> PartitionSpec:
    """Maps logical axes to mesh axes by `AXIS_RULES`; an unknown name is a `KeyError`."""
    return PartitionSpec(*(AXIS_RULES[axis] for axis in axes))


def sharding(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of one array; refuses a dimension the mesh does not divide."""
    spec = partition(axes)
    for axis, size, mesh_axis in zip(axes, shape, spec, strict=True):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            good = [n for n in range(1, mesh.shape[mesh_axis]) if size % n == 0]
            raise InvalidConfig(
                "tensor_parallel",
                f"a divisor of {axis} ({size}), for example {good[-1]}",
                mesh.shape[mesh_axis],
            )
    return NamedSharding(mesh, spec)
