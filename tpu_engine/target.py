"""`StepTarget`: what is needed to lower the step programs of one model for some devices.

Owns the way from a configuration and a model's own configuration to abstract weights and state
with their shardings; no weight is read and nothing is allocated, so a machine without the devices
can do it. Serving and warm-up lower through here, so that both get the same programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from buckets.plan import Plan
from buckets.shape import StepShape
from kernels.attention.cache_layout import KV_HEAD_AXIS, KvLayout
from tpu_engine.config import EngineConfig
from tpu_engine.kernel_choice import KernelChoice
from tpu_engine.models.config import ModelConfig
from tpu_engine.models.registry import Family, family_of
from tpu_engine.models.sharding import TENSOR, make_mesh, sharding
from tpu_engine.models.weights_spec import WeightSpec
from tpu_engine.step_inputs import InputLayout
from tpu_engine.step_program import StepProgram, StepState


@dataclass(frozen=True, slots=True)
class StepTarget:
    """Step programs of one model on one mesh, ready to be lowered.

    Attributes:
        config: with every derived value filled in.
        num_token_ids: ids that may be sampled.
        weights, state: `ShapeDtypeStruct`s with shardings, in the trees the step takes.
    """

    config: EngineConfig
    model: ModelConfig
    plan: Plan
    mesh: Mesh
    choice: KernelChoice
    num_token_ids: int
    program: StepProgram
    weights: nnx.State
    state: StepState

    @property
    def specs(self) -> Mapping[str, WeightSpec]:
        return family_of(self.model).weight_specs(self.model)

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    def arguments(self, shape: StepShape) -> tuple[nnx.State, StepState, jax.ShapeDtypeStruct]:
        """The abstract arguments of the step of `shape`."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        size = InputLayout.of(shape).size
        buffer = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=everywhere)
        return self.weights, self.state, buffer

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        """Traces and lowers the step of `shape`."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.program.function(shape).lower(*self.arguments(shape))


def make_target(
    config: EngineConfig,
    model: ModelConfig,
    plan: Plan,
    choice: KernelChoice,
    num_token_ids: int,
    devices: Sequence[Any],
) -> StepTarget:
    """The target of a derived configuration; refuses a mesh that doesn't divide the model."""
    mesh = make_mesh(config.tensor_parallel, list(devices))
    graph, abstract = abstract_model(family_of(model), model, config)
    return StepTarget(
        config=config,
        model=model,
        plan=plan,
        mesh=mesh,
        choice=choice,
        num_token_ids=num_token_ids,
        program=StepProgram(graph, mesh, choice, num_token_ids),
        weights=_placed(abstract, mesh),
        state=_abstract_state(config, model, mesh, choice.layout),
    )


def abstract_model(
    family: Family, model: ModelConfig, config: EngineConfig
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's static half, and its weights without values or places."""
    build = partial(family.build, model, jnp.dtype(config.dtype), config.quantize == "int8")
    return nnx.split(nnx.eval_shape(build))


def new_state(target: StepTarget) -> StepState:
    """Allocates the KV cache and the last-token buffer on the target's devices."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), target.state
    )


def _placed(abstract: nnx.State, mesh: Mesh) -> nnx.State:
    def placed(variable: Any) -> Any:
        value = variable.get_value()
        place = sharding(mesh, variable.get_metadata()["logical_axes"], value.shape)
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, placed(variable)) for path, variable in flat])


def _abstract_state(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, layout: KvLayout
) -> StepState:
    assert config.num_pages is not None
    shape = layout.shape(model.num_layers, config.num_pages)
    heads = PartitionSpec(*(TENSOR if i == KV_HEAD_AXIS else None for i in range(len(shape))))
    cache = jax.ShapeDtypeStruct(
        shape, jnp.dtype(layout.dtype), sharding=NamedSharding(mesh, heads)
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    last_tokens = jax.ShapeDtypeStruct((config.max_num_seqs,), jnp.int32, sharding=everywhere)
    return StepState(cast("Any", cache), cast("Any", last_tokens))
