"""The step program compiled by the real TPU compiler, without a TPU (`make test-tpu`).

Proves that the program lowers, compiles and updates the KV cache in place on every target; nothing
is executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kernels.attention.geometry import Geometry
from tests import tiny_model

pytestmark = pytest.mark.tpu

# (chip, devices, attention, weights, KV cache, heads)
PROGRAMS = [
    ("v4", 1, "pallas", "none", "bfloat16", (8, 2, 128)),
    ("v4", 1, "pallas", "none", "float8_e4m3fn", (8, 2, 128)),
    ("v5e", 1, "pallas", "int8", "bfloat16", (8, 2, 128)),
    ("v5p", 1, "pallas", "none", "bfloat16", (8, 2, 128)),
    ("v6e", 1, "pallas", "none", "bfloat16", (8, 2, 128)),
    ("v6e", 2, "pallas", "int8", "bfloat16", (8, 2, 128)),
    ("v6e", 2, "pallas", "none", "bfloat16", (6, 2, 64)),
    ("v6e", 1, "pallas", "none", "float8_e4m3fn", (8, 2, 128)),
    ("v6e", 2, "xla", "none", "bfloat16", (4, 2, 16)),
    ("tpu7x", 1, "pallas", "none", "bfloat16", (8, 2, 128)),
    ("tpu7x", 2, "pallas", "none", "float8_e4m3fn", (8, 2, 128)),
]

_COMPILE = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from buckets.shape import StepShape
from kernels.attention.cache_layout import KV_HEAD_AXIS
from kernels.chips import CHIPS
from tpu_engine.config import EngineConfig
from tpu_engine.derive import derive
from tpu_engine.kernel_choice import choose_kernels
from tpu_engine.models.registry import family_of
from tpu_engine.models.sharding import TENSOR, sharding
from tpu_engine.step_inputs import InputLayout
from tpu_engine.step_program import StepProgram, StepState
from tpu_engine.weights.open_model import open_model

chip, num_devices, attention, quantize, kv_dtype, model_dir = sys.argv[1:]
topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
mesh = Mesh(np.array(topology.devices[: int(num_devices)]), (TENSOR,))
model = open_model(model_dir).config
config = EngineConfig(
    model=model_dir, attention=attention, quantize=quantize, kv_dtype=kv_dtype,
    page_size=32, tensor_parallel=int(num_devices),
)
config = derive(config, model, "tpu")
choice = choose_kernels(config, model, model.vocab_size, CHIPS[chip].device_kind)
build = partial(family_of(model).build, model, jnp.dtype(config.dtype), quantize == "int8")
graph, abstract = nnx.split(nnx.eval_shape(build))

def placed(variable):
    value = variable.get_value()
    place = sharding(mesh, variable.get_metadata()["logical_axes"], value.shape)
    return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

weights = nnx.from_flat_state([(p, placed(v)) for p, v in nnx.to_flat_state(abstract)])
everywhere = NamedSharding(mesh, PartitionSpec())
heads = PartitionSpec(*(TENSOR if i == KV_HEAD_AXIS else None for i in range(6)))
cache = jax.ShapeDtypeStruct(choice.layout.shape(model.num_layers, 256), jnp.dtype(kv_dtype),
                             sharding=NamedSharding(mesh, heads))
state = StepState(cache, jax.ShapeDtypeStruct((8,), jnp.int32, sharding=everywhere))
shape = StepShape(32, 8, 64, 8)
buffer = jax.ShapeDtypeStruct((InputLayout.of(shape).size,), jnp.int32, sharding=everywhere)
program = StepProgram(graph, mesh, choice, model.vocab_size)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = program.function(shape).lower(weights, state, buffer).compile()
memory = compiled.memory_analysis()
cache_bytes = choice.layout.page_bytes(model.num_layers) * 256 // int(num_devices)
assert memory.alias_size_in_bytes >= cache_bytes, (memory, cache_bytes)
# A copy of the cache would show here; XLA's own path needs small ones of a few pages.
assert attention == "xla" or memory.temp_size_in_bytes < cache_bytes, (memory, cache_bytes)
kernels = {"decode_attention", "chunk_attention", "sampling_cutoffs"}
calls = [line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line]
found = {name for name in kernels if any(name in call for call in calls)}
assert found == (kernels if attention == "pallas" else set()), found
"""


# (chip, geometry) whose kernels once spilled more than the compiler was given.
SPILLING = [
    ("tpu7x", Geometry(4, 1, 256, 256, 128)),
    ("v5p", Geometry(128, 1, 640, 512, 64, latent=True)),
]

_COMPILE_CHUNK = """
import json, sys
from kernels.attention.geometry import Geometry
from kernels.attention.pallas.facts import HeadDims
from kernels.attention.pallas.lowering import Step, lower_kernel
from kernels.chips import CHIPS

geometry = Geometry(**json.loads(sys.argv[2]))
step = Step(64, 16, HeadDims(geometry.key_width, geometry.value_width))
lower_kernel("chunk_attention", geometry, step, CHIPS[sys.argv[1]]).program.compile()
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_step_program_compiles_for_tpu(
    repo_root: Path, tmp_path: Path, program: tuple[str, int, str, str, str, tuple[int, int, int]]
) -> None:
    chip, num_devices, attention, quantize, kv_dtype, (n, k, h) = program
    spec = tiny_model.TinySpec(num_heads=n, num_kv_heads=k, head_dim=h)
    tiny_model.write_hf(tmp_path, spec)
    options = (chip, str(num_devices), attention, quantize, kv_dtype, tmp_path)
    _run(repo_root, _COMPILE, *options)


@pytest.mark.parametrize(("chip", "geometry"), SPILLING, ids=[chip for chip, _ in SPILLING])
def test_chunk_kernel_has_room_for_its_spills(
    repo_root: Path, chip: str, geometry: Geometry
) -> None:
    _run(repo_root, _COMPILE_CHUNK, chip, json.dumps(asdict(geometry)))


def _run(repo_root: Path, program: str, *options: str | Path) -> None:
    """Runs a program that sees the TPU compiler and no accelerator."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it only compiles: others may do so as well
    }
    subprocess.run(
        [sys.executable, "-c", program, *options], check=True, cwd=repo_root, env=environment
    )
