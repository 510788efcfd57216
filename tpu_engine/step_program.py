"""The step program: from packed tokens to sampled tokens, one executable per shape.

Owns what a step computes and in which order. Knows no scheduler, no files and no compile cache:
it offers a function to lower for a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from buckets.shape import StepShape
from kernels.attention import AttentionWork, attention_work, ragged_paged_attention
from kernels.attention.cache_layout import KV_HEAD_AXIS
from tpu_engine.kernel_choice import KernelChoice
from tpu_engine.models.sharding import TENSOR
from tpu_engine.sampling import Sampled, SamplingRows, sample
from tpu_engine.step_inputs import FLOAT_FIELDS, InputLayout

# An interpreted kernel is a very large program that runs few times: not worth optimising.
_INTERPRETED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# page_table, kv_lens, cu_q_lens, num_seqs of a step
Batch = tuple[Array, Array, Array, Array]


class StepState(NamedTuple):
    """What lives on the device between steps; donated to every step and returned by it."""

    cache: Float[Array, "L P 2 K S H"]
    last_tokens: Int[Array, "slots"]


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Builds the step function of any shape for one model on one mesh.

    Attributes:
        graph: the model's static half (`nnx.split`); weights are an argument of the step.
        choice: the device ops of the step, and how the cache lies.
        num_token_ids: ids that may be sampled; a padded embedding has more rows than that.
    """

    graph: nnx.GraphDef
    mesh: Mesh
    choice: KernelChoice
    num_token_ids: int

    def function(self, shape: StepShape) -> Callable[..., tuple[StepState, Int[Array, "3 R"]]]:
        """The jitted step `(weights, state, buffer) -> (state, results)`; `state` is donated.

        `results` holds token ids, the bits of their log-probabilities and 1 where the row's
        logits were finite.
        """
        return jax.jit(partial(self._step, shape), donate_argnums=(1,))

    @property
    def compiler_options(self) -> Mapping[str, int | bool]:
        """Options the compiler should get for any of these programs."""
        return _INTERPRETED if self.choice.attention == "pallas-interpret" else {}

    def _step(
        self, shape: StepShape, weights: nnx.State, state: StepState, buffer: Int[Array, "n"]
    ) -> tuple[StepState, Int[Array, "3 R"]]:
        field = _unpack(InputLayout.of(shape), buffer)
        cache, last_tokens = state
        slots = field["device_slots"]
        on_device = last_tokens[jnp.maximum(slots, 0)]
        token_ids = jnp.where(slots >= 0, on_device, field["token_ids"])

        num_seqs = field["num_seqs"][0]
        batch = (field["page_table"], field["kv_lens"], field["cu_q_lens"], num_seqs)
        work = attention_work(
            *batch,
            num_tokens=shape.num_tokens,
            page_size=self.choice.layout.page_size,
            backend=self.choice.attention,
            kernels=self.choice.plan,
        )

        attention = self._sharded(self._attention)

        def attend(q: Array, k: Array, v: Array, cache: Array, layer: Array):
            return attention(q, k, v, cache, layer, batch, work)

        model = nnx.merge(self.graph, weights)
        hidden, cache = model(token_ids, work.places.positions, cache, attend)
        logits = model.logits(hidden[field["logit_rows"]])[:, : self.num_token_ids]
        rows = SamplingRows(*(field[name] for name in SamplingRows._fields))
        sampled = self._everywhere(partial(sample, backend=self.choice.sampling))(logits, rows)
        last_tokens = last_tokens.at[field["target_slots"]].set(sampled.token_ids, mode="drop")
        bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
        results = jnp.stack([sampled.token_ids, bits, sampled.finite.astype(jnp.int32)])
        return StepState(cache, last_tokens), results

    def _attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: Array,
        layer: Array,
        batch: Batch,
        work: AttentionWork,
    ) -> tuple[Array, Array]:
        """One device's share of the heads."""
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layer,
            *batch,
            layout=self.choice.layout.per_shard(self.mesh.size),
            backend=self.choice.attention,
            kernels=self.choice.plan,
            work=work,
        )

    def _sharded(self, attention: Callable[..., tuple[Array, Array]]):
        """Runs attention per shard of the KV heads; heads never talk to each other."""
        if self.mesh.size == 1:
            return attention
        heads = PartitionSpec(None, TENSOR, None)
        cache = PartitionSpec(*(TENSOR if i == KV_HEAD_AXIS else None for i in range(6)))
        everywhere = PartitionSpec()
        return jax.shard_map(
            attention,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, cache, everywhere, everywhere, everywhere),
            out_specs=(heads, cache),
            check_vma=False,
        )

    def _everywhere(self, sampling: Callable[..., Sampled]) -> Callable[..., Sampled]:
        """Runs sampling whole on every device: a kernel can't be split by the compiler."""
        if self.mesh.size == 1 or self.choice.sampling == "xla":
            return sampling
        spec = PartitionSpec()
        return jax.shard_map(
            sampling, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )


def _unpack(layout: InputLayout, buffer: Int[Array, "n"]) -> dict[str, Array]:
    fields: dict[str, Array] = {}
    for name, (offset, dims) in layout.fields.items():
        value = jax.lax.slice_in_dim(buffer, offset, offset + math.prod(dims)).reshape(dims)
        if name in FLOAT_FIELDS:
            value = jax.lax.bitcast_convert_type(value, jnp.float32)
        elif name == "seed":
            value = jax.lax.bitcast_convert_type(value, jnp.uint32)
        fields[name] = value
    return fields
