"""The step program compiled by the real TPU compiler, without a TPU (`make test-tpu`).

Proves that the program lowers, compiles and updates the KV cache in place on every target; nothing
is executed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_model

pytestmark = pytest.mark.tpu

TARGETS = [("v6e:2x2", 1), ("v6e:2x2", 2), ("v5e:2x2", 1)]

_COMPILE = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from buckets.shape import StepShape
from kernels.attention.cache_layout import KV_HEAD_AXIS, kv_cache_shape
from tpu_engine.models.registry import family_of
from tpu_engine.models.sharding import TENSOR, sharding
from tpu_engine.step_inputs import InputLayout
from tpu_engine.step_program import StepProgram, StepState
from tpu_engine.weights.open_model import open_model

name, num_devices, model_dir, quantized = sys.argv[1:]
topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
mesh = Mesh(np.array(topology.devices[: int(num_devices)]), (TENSOR,))
config = open_model(model_dir).config
build = partial(family_of(config).build, config, jnp.dtype(jnp.bfloat16), quantized == "int8")
graph, abstract = nnx.split(nnx.eval_shape(build))

def placed(variable):
    value = variable.get_value()
    place = sharding(mesh, variable.get_metadata()["logical_axes"], value.shape)
    return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

weights = nnx.from_flat_state([(p, placed(v)) for p, v in nnx.to_flat_state(abstract)])
everywhere = NamedSharding(mesh, PartitionSpec())
heads = PartitionSpec(*(TENSOR if i == KV_HEAD_AXIS else None for i in range(6)))
cache_shape = kv_cache_shape(num_layers=config.num_layers, num_pages=256, page_size=16,
                             num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
cache = jax.ShapeDtypeStruct(cache_shape, jnp.bfloat16, sharding=NamedSharding(mesh, heads))
state = StepState(cache, jax.ShapeDtypeStruct((8,), jnp.int32, sharding=everywhere))
shape = StepShape(32, 8, 64, 8)
buffer = jax.ShapeDtypeStruct((InputLayout.of(shape).size,), jnp.int32, sharding=everywhere)
program = StepProgram(graph, mesh, 16, "xla", config.vocab_size)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = program.function(shape).lower(weights, state, buffer)
memory = lowered.compile().memory_analysis()
cache_bytes = cache.size * 2 // int(num_devices)
assert memory.alias_size_in_bytes >= cache_bytes, (memory, cache_bytes)
"""


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(("topology", "num_devices"), TARGETS)
def test_step_program_compiles_for_tpu(
    repo_root: Path, tmp_path: Path, topology: str, num_devices: int, quantize: str
) -> None:
    tiny_model.write_hf(tmp_path)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
    }
    command = [sys.executable, "-c", _COMPILE, topology, str(num_devices), tmp_path, quantize]
    subprocess.run(command, check=True, cwd=repo_root, env=environment)
