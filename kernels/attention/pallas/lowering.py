"""Lowers one kernel by itself for a chip that isn't there, from shapes alone.

Owns the abstract operands of a representative step. For reports and tuning; a model's own program
is lowered by whoever owns it. Reads no environment: the caller's process must see the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.analysis.prediction import CONTEXTS, StepFacts, WorkFacts
from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.options import LayerData
from kernels.attention.pallas import blocks as choice
from kernels.attention.pallas import chunk_blocks, decode_blocks, facts
from kernels.attention.pallas.chunk import chunk_attention
from kernels.attention.pallas.chunk_work import chunk_work
from kernels.attention.pallas.decode import decode_attention
from kernels.attention.pallas.decode_work import decode_work
from kernels.attention.pallas.tables import step_tables
from kernels.chips import Chip

# A cache this large stays in HBM; a small one XLA would move to VMEM as a whole.
CACHE_BYTES = 1 << 30
NUM_LAYERS = 2
MAX_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class Step:
    """The step a kernel is lowered for, and the useful lanes of a head."""

    num_tokens: int
    num_seqs: int
    dims: facts.HeadDims


@dataclass(frozen=True, slots=True)
class LoweredKernel:
    """A kernel ready to be compiled, and what it states about itself.

    `steps()` is by context length, for kernels whose work depends on where a chunk lies.
    """

    program: Any
    blocks: dict[str, int]
    vmem_estimate: int
    smem_estimate: int
    work: WorkFacts
    steps: Callable[[], dict[int, StepFacts]]


def lower_kernel(
    kernel: str, geometry: Geometry, step: Step, chip: Chip, given: Mapping[str, int] | None = None
) -> LoweredKernel:
    """Lowers the decode or the chunk kernel; `given` blocks take the place of the chosen ones."""
    scoring = Scoring(scale=step.dims.key**-0.5)
    if kernel == "decode_attention":
        return _lower_decode(geometry, scoring, step, chip, given)
    return _lower_chunk(geometry, scoring, step, chip, given)


def _lower_decode(
    geometry: Geometry,
    scoring: Scoring,
    step: Step,
    chip: Chip,
    given: Mapping[str, int] | None,
) -> LoweredKernel:
    blocks = choice.decode_blocks_for(geometry, scoring, chip)
    if given is not None:
        blocks = replace(blocks, **given)
    decode_blocks.check_blocks(geometry, scoring, blocks, chip)

    def run(q: Any, k_new: Any, v_new: Any, cache: Any, layer: Any, *tables: Any) -> Any:
        rows = step_tables(*tables, decode_queries=blocks.decode_queries)
        work = decode_work(rows, num_tokens=q.shape[0], decode_queries=blocks.decode_queries)
        return decode_attention(
            q,
            k_new,
            v_new,
            cache,
            work,
            LayerData(layer),
            geometry=geometry,
            scoring=scoring,
            blocks=blocks,
            interpret=False,
        )

    return LoweredKernel(
        program=_lower(run, geometry, step, chip),
        blocks=asdict(blocks),
        vmem_estimate=decode_blocks.vmem_bytes(geometry, scoring, blocks),
        smem_estimate=decode_blocks.smem_bytes(geometry, scoring, blocks, num_rows=step.num_seqs),
        work=facts.decode_facts(geometry, step.dims, blocks),
        steps=dict,
    )


def _lower_chunk(
    geometry: Geometry,
    scoring: Scoring,
    step: Step,
    chip: Chip,
    given: Mapping[str, int] | None,
) -> LoweredKernel:
    blocks = choice.chunk_blocks_for(geometry, scoring, chip)
    if given is not None:
        blocks = replace(blocks, **given)
    chunk_blocks.check_blocks(geometry, scoring, blocks, chip)

    def run(q: Any, k_new: Any, v_new: Any, cache: Any, layer: Any, *tables: Any) -> Any:
        rows = step_tables(*tables, decode_queries=1)
        work = chunk_work(rows, num_tokens=q.shape[0], geometry=geometry, blocks=blocks)
        out, cache = chunk_attention(
            q,
            k_new,
            v_new,
            cache,
            work,
            LayerData(layer),
            geometry=geometry,
            scoring=scoring,
            blocks=blocks,
            interpret=False,
        )
        # As the output projection takes it; heads in between would be laid out anew for nobody.
        return out.reshape(out.shape[0], -1), cache

    items = step.num_tokens // blocks.q_tokens + 2 * step.num_seqs
    return LoweredKernel(
        program=_lower(run, geometry, step, chip),
        blocks=asdict(blocks),
        vmem_estimate=chunk_blocks.vmem_bytes(geometry, scoring, blocks),
        smem_estimate=chunk_blocks.smem_bytes(items, step.num_seqs),
        work=facts.chunk_facts(geometry, step.dims, blocks),
        steps=partial(
            facts.chunk_steps, geometry, step.dims, blocks, step.num_tokens, (0, *CONTEXTS)
        ),
    )


def _lower(run: Callable[..., Any], geometry: Geometry, step: Step, chip: Chip) -> Any:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    placed = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    page = (geometry.num_planes, geometry.num_kv_heads, geometry.page_size, geometry.key_width)
    kv = jnp.dtype(geometry.kv_dtype)
    num_pages = CACHE_BYTES // (NUM_LAYERS * int(np.prod(page)) * kv.itemsize)
    tokens, rows = step.num_tokens, step.num_seqs
    pages_per_seq = MAX_CONTEXT // geometry.page_size
    new = placed((tokens, geometry.num_kv_heads, geometry.key_width), kv)
    operands = (
        placed((tokens, geometry.num_q_heads, geometry.key_width), jnp.dtype(geometry.q_dtype)),
        new,
        None if geometry.latent else new,
        placed((NUM_LAYERS, num_pages, *page), kv),
        placed((), jnp.int32),
        placed((rows, pages_per_seq), jnp.int32),
        placed((rows,), jnp.int32),
        placed((rows + 1,), jnp.int32),
        placed((), jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(run, donate_argnums=3).lower(*operands)
