"""Fills in what the configuration left open: pure functions from options and facts to options.

Owns the default rules (dtype, attention, length, pool size). Knows no device: platform and memory
are arguments.
"""

from __future__ import annotations

from dataclasses import replace

from buckets.plan import PlanLimits
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.models.config import ModelConfig

DEFAULT_MAX_MODEL_LEN = 4096


def derive(config: EngineConfig, model: ModelConfig, platform: str) -> EngineConfig:
    """Fills in dtypes, attention and length; `platform` is "cpu" or "tpu".

    Raises `InvalidConfig` where what was asked for can't be had.
    """
    on_tpu = platform == "tpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_tpu else "float32"
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    attention = config.attention
    if attention == "auto":
        attention = "pallas" if on_tpu else "xla"
    if attention == "pallas" and not on_tpu:
        limit = f"xla or pallas-interpret on {platform} (pallas needs a TPU)"
        raise InvalidConfig("attention", limit, attention)
    max_model_len = config.max_model_len
    if max_model_len is None:
        max_model_len = min(model.max_model_len, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.max_model_len:
        raise InvalidConfig(
            "max_model_len", f"at most the model's {model.max_model_len}", max_model_len
        )
    return replace(
        config, dtype=dtype, kv_dtype=kv_dtype, attention=attention, max_model_len=max_model_len
    )


def with_pages(config: EngineConfig, page_bytes: int, kv_bytes: int) -> EngineConfig:
    """Fills in `num_pages`: enough for every slot at full length, or what fits in `kv_bytes`.

    `page_bytes` and `kv_bytes` are of one device; the null page counts too. Raises
    `InvalidConfig` where not even one request of `max_model_len` fits.
    """
    longest = pages_per_seq(config)
    if config.num_pages is not None:
        num_pages = config.num_pages
        limit = f"at least {longest + 1} (one request of max_model_len, and the null page)"
    else:
        fits = max(kv_bytes // page_bytes, 0)
        num_pages = min(config.max_num_seqs * longest + 1, fits)
        limit = f"lower: one request needs {longest + 1} pages and {fits} fit in memory"
        if num_pages < longest + 1:
            raise InvalidConfig("max_model_len", limit, config.max_model_len)
    if num_pages < longest + 1:
        raise InvalidConfig("num_pages", limit, num_pages)
    return replace(config, num_pages=num_pages)


def plan_limits(config: EngineConfig) -> PlanLimits:
    """The budgets the compiled plan must meet, from a derived configuration."""
    return PlanLimits(config.max_num_seqs, config.max_num_batched_tokens, pages_per_seq(config))


def pages_per_seq(config: EngineConfig) -> int:
    """Pages of the longest request (`max_model_len` of a derived configuration)."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.page_size)
