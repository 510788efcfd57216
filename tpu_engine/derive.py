"""Fills in what the configuration left open: pure functions from options and facts to options.

Owns the default rules (dtype, length, pool size). Knows no device: platform and memory are
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from buckets.plan import PlanLimits
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.models.config import ModelConfig

DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the rules need of the machine: "cpu" or "tpu", and bytes free for KV pages."""

    platform: str
    kv_bytes: int


def derive(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> EngineConfig:
    """Returns `config` with nothing left at None or "auto" (`max_chunk`, `compile_cache` may be).

    Raises `InvalidConfig` where what was asked for can't be had.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.platform == "tpu" else "float32"
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    max_model_len = config.max_model_len
    if max_model_len is None:
        max_model_len = min(model.max_model_len, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.max_model_len:
        raise InvalidConfig(
            "max_model_len", f"at most the model's {model.max_model_len}", max_model_len
        )
    config = replace(config, dtype=dtype, kv_dtype=kv_dtype, max_model_len=max_model_len)
    return replace(config, num_pages=_num_pages(config, model, device))


def plan_limits(config: EngineConfig) -> PlanLimits:
    """The budgets the compiled plan must meet, from a derived configuration."""
    return PlanLimits(config.max_num_seqs, config.max_num_batched_tokens, pages_per_seq(config))


def pages_per_seq(config: EngineConfig) -> int:
    """Pages of the longest request (`max_model_len` of a derived configuration)."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.page_size)


def page_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of one page over all layers, K and V."""
    itemsize = 4 if config.kv_dtype == "float32" else 2
    positions = model.num_layers * config.page_size
    return positions * 2 * model.num_kv_heads * model.head_dim * itemsize


def _num_pages(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> int:
    """Enough for every slot at full length, or what fits; the null page comes on top."""
    longest = pages_per_seq(config)
    if config.num_pages is not None:
        num_pages = config.num_pages
        limit = f"at least {longest + 1} (one request of max_model_len, and the null page)"
    else:
        fits = device.kv_bytes // page_bytes(config, model)
        num_pages = min(config.max_num_seqs * longest, fits) + 1
        limit = f"lower: one request needs {longest} pages and {fits} fit in memory"
        if num_pages < longest + 1:
            raise InvalidConfig("max_model_len", limit, config.max_model_len)
    if num_pages < longest + 1:
        raise InvalidConfig("num_pages", limit, num_pages)
    return num_pages
