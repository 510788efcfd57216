"""`StepTarget`: what is needed to lower the step programs of one model for some devices.

Owns the way from a configuration and a model's own configuration to abstract weights and state
with their shardings; no weight is read and nothing is allocated, so a machine without the devices
can do it. Serving and warm-up lower through here, so that both get the same programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
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
from tpu_engine.models.registry import family_of
from tpu_engine.models.sharding import TENSOR, make_mesh, sharding
from tpu_engine.models.weights_spec import WeightSpec
from tpu_engine.step_inputs import InputLayout
from tpu_engine.step_program import StepProgram, StepState

# Options that decide how an engine runs, and nothing of its programs.
_IDLE_OPTIONS = (
    "model",
    "max_waiting",
    "max_chunk",
    "overlap",
    "plan",
    "compile_cache",
    "signing_key",
    "canary",
    "hbm_reserve",
    "require_warm",
    "on_miss",
)
# Everything a step program is traced from lies in these folders.
_SOURCES = ("kernels", "tpu_engine", "buckets")


@dataclass(frozen=True)
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

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        return dict(self.mesh.shape)

    def recipe(self, shape: StepShape) -> str:
        """Digest of everything this program is traced from: our code, the model, the options."""
        return hashlib.sha256(f"{self._ingredients}{shape}".encode()).hexdigest()

    @cached_property
    def _ingredients(self) -> str:
        options = asdict(self.config)
        for name in _IDLE_OPTIONS:
            del options[name]
        facts = [options, asdict(self.model), repr(self.choice), self.num_token_ids]
        return json.dumps(
            [*facts, source_digest(), version("flax")], sort_keys=True, default=sorted
        )

    def compiler_options(self, shape: StepShape) -> Mapping[str, str | int | float | bool]:
        """Options of the compiler for the program of `shape`."""
        return {**self.program.compiler_options, **self.plan.compiler_options(shape)}

    def trees(self, shape: StepShape) -> tuple[Any, Any]:
        """Structures of the step's `(args, kwargs)` and of its results."""
        structure = jax.tree.structure
        arguments = self.arguments(shape)
        return structure((arguments, {})), structure((self.state, arguments[-1]))

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
    graph, _ = abstract_model(model, config)
    return StepTarget(
        config=config,
        model=model,
        plan=plan,
        mesh=mesh,
        choice=choice,
        num_token_ids=num_token_ids,
        program=StepProgram(graph, mesh, choice, num_token_ids),
        weights=placed_weights(config, model, mesh),
        state=_abstract_state(config, model, mesh, choice.layout),
    )


def source_digest() -> str:
    """Digest of our own code and tables, wherever it is installed."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(file for name in _SOURCES for file in (root / name).rglob("*")):
        if path.suffix in (".py", ".json"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def abstract_model(model: ModelConfig, config: EngineConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's static half, and its weights without values or places."""
    build = partial(
        family_of(model).build, model, jnp.dtype(config.dtype), config.quantize == "int8"
    )
    return nnx.split(nnx.eval_shape(build))


def placed_weights(config: EngineConfig, model: ModelConfig, mesh: Mesh) -> nnx.State:
    """Abstract weights with their shardings; refuses a mesh that doesn't divide the model."""
    _, abstract = abstract_model(model, config)

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
