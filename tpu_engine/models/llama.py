"""The Llama family: its weight table and its forward pass, layers stacked and scanned.

Owns the shapes, axes and names of Llama weights and the code of one layer, written once. Knows
nothing of the cache's layout, of batches or of sampling: attention is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_engine.models.config import ModelConfig
from tpu_engine.models.layers import (
    Dense,
    rms_norm,
    rope_angles,
    rotate,
    weight_param,
)
from tpu_engine.models.weights_spec import Index, WeightSpec, plain
from tpu_engine.weights.source import TensorSource

# (q, k, v, cache, layer) -> (attention output, cache)
Attend = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """The table of all weights: shape, logical axes, checkpoint tensors, reader."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    k, h = config.num_kv_heads, config.head_dim
    g = config.num_heads // k
    layer = "model.layers.{layer}."
    specs = {
        "embed": plain(
            "model.embed_tokens.weight", ("vocab", "embed"), (v, d), num_in=1, stacked=False
        ),
        "attention_norm": plain(layer + "input_layernorm.weight", ("embed",), (d,)),
        "qkv": _qkv_spec(config),
        "attention_out": plain(
            layer + "self_attn.o_proj.weight",
            ("embed", "kv_heads", "heads_per_kv", "head_dim"),
            (d, k, g, h),
            num_in=3,
            file_shape=(d, k * g * h),
        ),
        "mlp_norm": plain(layer + "post_attention_layernorm.weight", ("embed",), (d,)),
        "gate_up": _gate_up_spec(config),
        "down": plain(layer + "mlp.down_proj.weight", ("embed", "ffn"), (d, f), num_in=1),
        "final_norm": plain("model.norm.weight", ("embed",), (d,), stacked=False),
    }
    if not config.tie_embeddings:
        specs["head"] = plain("lm_head.weight", ("vocab", "embed"), (v, d), num_in=1, stacked=False)
    return specs


def _qkv_spec(config: ModelConfig) -> WeightSpec:
    """Fused projection `[K, N/K + 2, H, D]`: per KV head its query heads, then its key, its value.

    Grouped this way a shard of the K axis holds whole groups.
    """
    d, k, h = config.hidden_size, config.num_kv_heads, config.head_dim
    g = config.num_heads // k
    prefix = "model.layers.{layer}.self_attn."

    def read(source: TensorSource, layer: int, index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(k)
        parts = []
        for name, per_group in (("q_proj", g), ("k_proj", 1), ("v_proj", 1)):
            rows = slice(first * per_group * h, last * per_group * h)
            part = source.read(f"{prefix.format(layer=layer)}{name}.weight", (rows,))
            parts.append(part.reshape(last - first, per_group, h, d))
        return np.concatenate(parts, axis=1)[(slice(None), *index[1:])]

    tensors = {
        prefix + "q_proj.weight": (k * g * h, d),
        prefix + "k_proj.weight": (k * h, d),
        prefix + "v_proj.weight": (k * h, d),
    }
    axes = ("kv_heads", "heads_per_kv", "head_dim", "embed")
    return WeightSpec((k, g + 2, h, d), axes, 1, tensors, read)


def _gate_up_spec(config: ModelConfig) -> WeightSpec:
    """Fused gate and up projection `[2, F, D]`."""
    d, f = config.hidden_size, config.intermediate_size
    names = [f"model.layers.{{layer}}.mlp.{part}_proj.weight" for part in ("gate", "up")]

    def read(source: TensorSource, layer: int, index: Index) -> np.ndarray:
        parts = [source.read(name.format(layer=layer), (index[1],)) for name in names]
        return np.stack(parts)[(index[0], slice(None), *index[2:])]

    axes = ("gate_up", "ffn", "embed")
    return WeightSpec((2, f, d), axes, 1, dict.fromkeys(names, (f, d)), read)


class LlamaLayers(nnx.Module):
    """All layers: every weight with a leading axis `L`; sliced by the scan to one layer."""

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        config: ModelConfig,
        dtype: jnp.dtype,
        quantized: bool,
    ) -> None:
        layers = config.num_layers
        self.eps = config.rms_norm_eps
        self.attention_norm = weight_param(specs["attention_norm"], layers, dtype)
        self.qkv = Dense(specs["qkv"], layers, dtype, quantized=quantized)
        self.attention_out = Dense(specs["attention_out"], layers, dtype, quantized=quantized)
        self.mlp_norm = weight_param(specs["mlp_norm"], layers, dtype)
        self.gate_up = Dense(specs["gate_up"], layers, dtype, quantized=quantized)
        self.down = Dense(specs["down"], layers, dtype, quantized=quantized)

    def __call__(
        self,
        x: Float[Array, "T D"],
        cos: Array,
        sin: Array,
        cache: Array,
        layer: Array,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Array]:
        """One layer; weights are sliced to it already."""
        qkv = self.qkv(rms_norm(x, self.attention_norm[...], self.eps))  # [T, K, N/K + 2, H]
        num_tokens, head_dim = qkv.shape[0], qkv.shape[-1]
        queries = qkv[:, :, :-2].reshape(num_tokens, -1, head_dim)
        keys, values = qkv[:, :, -2], qkv[:, :, -1]
        attended, cache = attend(
            rotate(queries, cos, sin), rotate(keys, cos, sin), values, cache, layer
        )
        x = x + self.attention_out(attended)
        gate_up = self.gate_up(rms_norm(x, self.mlp_norm[...], self.eps))  # [T, 2, F]
        return x + self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]), cache


class Llama(nnx.Module):
    """The whole model; build it under `nnx.eval_shape`, weights are loaded into its state."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, quantized: bool) -> None:
        specs = weight_specs(config)
        self.config = config
        self.embed = Dense(specs["embed"], 0, dtype, quantized=quantized)
        self.layers = LlamaLayers(specs, config, dtype, quantized)
        self.final_norm = weight_param(specs["final_norm"], 0, dtype)
        untied = "head" in specs
        self.head = nnx.data(
            Dense(specs["head"], 0, dtype, quantized=quantized) if untied else None
        )
        self.dtype = dtype

    def __call__(
        self,
        token_ids: Int[Array, "T"],
        positions: Int[Array, "T"],
        cache: Float[Array, "L P 2 K S H"],
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Float[Array, "L P 2 K S H"]]:
        """Returns the normalised hidden states `[T, D]` and the written cache."""
        x = embed_tokens(self.embed, token_ids, self.dtype)
        cos, sin = rope_angles(positions, self.config.rope_inverse_frequencies())
        graph, stacked = nnx.split(self.layers)

        def one_layer(carry: tuple[Array, Array], layer_input: tuple[nnx.State, Array]):
            x, cache = carry
            weights, layer = layer_input
            return nnx.merge(graph, weights)(x, cos, sin, cache, layer, attend), None

        layer_numbers = jnp.arange(cache.shape[0], dtype=jnp.int32)
        (x, cache), _ = jax.lax.scan(one_layer, (x, cache), (stacked, layer_numbers))
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps), cache

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Float32 logits of the rows of `hidden`."""
        head = self.embed if self.head is None else self.head
        return head(hidden).astype(jnp.float32)


def embed_tokens(embed: Dense, token_ids: Int[Array, "T"], dtype: jnp.dtype) -> Float[Array, "T D"]:
    """Looks up embedding rows; a quantised table is scaled back row by row."""
    rows = embed.kernel[...][token_ids]
    if embed.scale is not None:
        rows = rows.astype(jnp.float32) * embed.scale[...][token_ids][:, None]
    return rows.astype(dtype)
