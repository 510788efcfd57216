"""Which model family serves which `ModelConfig.architecture`.

Owns that one map. Doesn't know checkpoints: `ModelConfig` already translated their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from tpu_engine.errors import InvalidModel
from tpu_engine.models import llama
from tpu_engine.models.config import ModelConfig
from tpu_engine.models.weights_spec import WeightSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What the engine needs of a family: its weight table and its module."""

    weight_specs: Callable[[ModelConfig], dict[str, WeightSpec]]
    build: Callable[[ModelConfig, jnp.dtype, bool], llama.Llama]


def _build_llama(config: ModelConfig, dtype: jnp.dtype, quantized: bool) -> llama.Llama:
    return llama.Llama(config, dtype, quantized=quantized)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(llama.weight_specs, _build_llama),
}


def family_of(config: ModelConfig) -> Family:
    """Returns the family of a configuration; an unknown architecture is refused by name."""
    try:
        return FAMILIES[config.architecture]
    except KeyError:
        known = ", ".join(FAMILIES)
        raise InvalidModel(
            f"architecture {config.architecture!r} is not supported; supported: {known}"
        ) from None
