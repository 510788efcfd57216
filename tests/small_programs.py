"""Programs small enough to compile in milliseconds, for tests of the compile cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from buckets.shape import StepShape

SHAPES = [StepShape(n, 1, 1, 1) for n in (2, 3)]


def sum_and_double(x: jax.Array) -> dict[str, jax.Array]:
    return {"sum": x.sum(), "twice": x * 2}


def one_more(x: jax.Array) -> dict[str, jax.Array]:
    return {"sum": x.sum() + 1, "twice": x * 2}


@dataclass
class SmallPrograms:
    """`function` on a vector of `num_tokens`; `source` stands for the source code's digest."""

    function: Callable[[jax.Array], Any] = sum_and_double
    source: str = "1"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lowered: list[StepShape] = field(default_factory=list[StepShape])

    @property
    def devices(self) -> list[Any]:
        return jax.devices()[:1]

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        return {"tensor": 1}

    def recipe(self, shape: StepShape) -> str:
        return f"{self.function.__name__} {self.source} {shape}"

    def compiler_options(self, shape: StepShape) -> Mapping[str, Any]:
        return self.options

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        self.lowered.append(shape)
        return jax.jit(self.function).lower(self._argument(shape))

    def trees(self, shape: StepShape) -> tuple[Any, Any]:
        argument = self._argument(shape)
        results = jax.eval_shape(self.function, argument)
        return jax.tree.structure(((argument,), {})), jax.tree.structure(results)

    def _argument(self, shape: StepShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape.num_tokens,), jnp.float32)
