"""The small program that allocates the KV cache: planned, warmed and stored like any other.

Owns its place among the programs. Without it a warm start would still compile: filling an array
with zeros is a program too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from buckets.cache_store import CacheStore
from buckets.compile_cache import CompileCache
from buckets.executable import ExecutableRecord
from buckets.shape import StepShape
from tpu_engine.step_program import StepState
from tpu_engine.target import StepTarget

# It has no step shape; a name of its own keeps it apart from those that do.
NEW_STATE = StepShape(1, 1, 1, 1, "new-state")


@dataclass(frozen=True, slots=True)
class StateProgram:
    """`() -> StepState`, all zeros, on the target's devices; one of `buckets`' `Programs`."""

    target: StepTarget

    @property
    def devices(self) -> list[Any]:
        return self.target.devices

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        return self.target.mesh_axes

    def recipe(self, shape: StepShape) -> str:
        return self.target.recipe(shape)

    def compiler_options(self, shape: StepShape) -> Mapping[str, str | int | float | bool]:
        return {}

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        state = self.target.state

        def new_state() -> StepState:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)

        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        return jax.jit(new_state, out_shardings=places).lower()

    def trees(self, shape: StepShape) -> tuple[Any, Any]:
        return jax.tree.structure(((), {})), jax.tree.structure(self.target.state)


def new_state(
    target: StepTarget, store: CacheStore | None, *, require_warm: bool = False
) -> tuple[StepState, ExecutableRecord]:
    """Allocates the KV cache and the last-token buffer, by a stored program where there is one.

    Raises `NotWarm` where it would have to be compiled and must not.
    """
    executables = CompileCache(StateProgram(target), store, require_warm=require_warm)
    [record] = executables.build([NEW_STATE])
    return executables.get(NEW_STATE)(), record
