"""What the cost model is told of this engine: the roofline of a model on a chip.

Owns the arithmetic from architecture to amounts. The cost model itself is `buckets/cost.py`.
"""

from __future__ import annotations

from buckets.cost import Roofline
from kernels.chips import Chip
from tpu_engine.models.config import ModelConfig

# Chips with two cores that JAX shows as one device; `kernels.chips` has the figures of one core.
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
# What an ordinary server processor gives one program; observations correct it.
CPU_BYTES_PER_S, CPU_FLOPS_PER_S = 2e10, 2e11


def roofline_of(
    model: ModelConfig, chip: Chip | None, num_shards: int, weight_bytes: int, kv_token_bytes: float
) -> Roofline:
    """The roofline of one device; `chip` None is this machine's processor, with nominal figures.

    `weight_bytes` and `kv_token_bytes` (of one position, all layers) are one device's share.
    """
    head = 2 * model.vocab_size * model.hidden_size / num_shards
    layer = 2 * _layer_weights(model) / num_shards
    pair = 4 * model.num_heads * model.head_dim * model.num_layers / num_shards
    cores = 1 if chip is None else _CORES_PER_DEVICE.get(chip.name, 1)
    return Roofline(
        bytes_per_s=CPU_BYTES_PER_S if chip is None else cores * chip.hbm_bytes_per_s,
        flops_per_s=CPU_FLOPS_PER_S if chip is None else cores * chip.bf16_flops,
        weight_bytes=float(weight_bytes),
        flops_per_token=layer * model.num_layers,
        flops_per_logit_row=head,
        kv_token_bytes=kv_token_bytes,
        flops_per_pair=pair,
        fixed_s=1e-4 if chip is None else 0.0,
        is_exact=chip is not None,
    )


def _layer_weights(model: ModelConfig) -> int:
    """Weights of one layer's projections."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * heads * model.head_dim
    return attention + 3 * model.hidden_size * model.intermediate_size
