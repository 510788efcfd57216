"""Model configs: both spellings, both formats, and the refusal of what can't be computed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests import tiny_model
from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import Llama3RopeScaling, ModelConfig, RopeDivisors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": [str(i) for i in range(512)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}


def hf(**changes: Any) -> dict[str, Any]:
    return tiny_model.config_json() | changes


def test_hf_config_is_read() -> None:
    config = ModelConfig.from_hf(hf(), {"eos_token_id": [2, 5], "bos_token_id": 3})
    assert config == ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_model_len=1024,
        bos_id=3,
        eos_ids=frozenset({2, 5}),
        dtype="float32",
    )


def test_old_and_new_spellings_mean_the_same() -> None:
    new = hf(rope_parameters={"rope_theta": 5e5, **LLAMA3})
    old = hf(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="float32")
    for key in ("rope_parameters", "dtype"):
        del old[key]
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)
    assert ModelConfig.from_hf(old).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def test_left_out_fields_take_the_documented_defaults() -> None:
    config = hf()
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "dtype", "eos_token_id"):
        del config[key]
    read = ModelConfig.from_hf(config)
    assert (read.head_dim, read.num_kv_heads, read.rope_theta) == (16, 4, 10000.0)
    assert (read.dtype, read.eos_ids) == (None, frozenset())


def test_gguf_config_is_read() -> None:
    config = ModelConfig.from_gguf(GGUF, tie_embeddings=True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_model_len) == (16, 512, 1024)
    assert (config.bos_id, config.eos_ids, config.tie_embeddings) == (1, frozenset({2, 7}), True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures .*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act .*silu.*gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope_type .*llama3.*yarn"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4}}, "rope_parameters.factor"),
        ({"rope_parameters": {**LLAMA3, "mystery": 1}}, "mystery"),
        ({"rope_parameters": {**LLAMA3, "type": "linear"}}, "type"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"dtype": "float8"}, "dtype"),
        ({"num_hidden_layers": 0}, "num_layers .*positive.*0"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads .*divisor.*3"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 6}, "head_dim"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": 512}, "eos id 512 .*512"),
        ({"bos_token_id": "1"}, "bos_token_id"),
    ],
)
def test_unsupported_hf_configs_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidModel, match=named):
        ModelConfig.from_hf(hf(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen2"),
        ("llama.rope.scaling.type", "linear"),
        ("llama.expert_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.attention.sliding_window", 512),
    ],
)
def test_unsupported_gguf_metadata_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InvalidModel, match=key):
        ModelConfig.from_gguf({**GGUF, key: value}, tie_embeddings=True)


def test_plain_rope_frequencies() -> None:
    frequencies = ModelConfig.from_hf(hf()).rope_inverse_frequencies()
    assert frequencies == pytest.approx([10000.0 ** (-2 * i / 16) for i in range(8)])


def test_llama3_scaling_keeps_fast_and_slows_slow_frequencies() -> None:
    scaled = hf(rope_parameters={"rope_theta": 5e5, **LLAMA3}, head_dim=64)
    plain = hf(rope_parameters={"rope_theta": 5e5}, head_dim=64)
    ratios = [
        before / after
        for before, after in zip(
            ModelConfig.from_hf(plain).rope_inverse_frequencies(),
            ModelConfig.from_hf(scaled).rope_inverse_frequencies(),
            strict=True,
        )
    ]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(8.0)
    assert ratios == sorted(ratios)
    between = [ratio for ratio in ratios if 1.001 < ratio < 7.999]
    assert between, "the smooth part must not be empty"
    # By hand, for the first frequency of the smooth part.
    frequency = 5e5 ** (-2 * ratios.index(between[0]) / 64)
    smooth = (8192 * frequency / (2 * math.pi) - 1.0) / 3.0
    assert between[0] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))


def test_stored_divisors_are_applied() -> None:
    divisors = [1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    plain = ModelConfig.from_gguf(GGUF, tie_embeddings=True)
    scaled = ModelConfig.from_gguf(GGUF, tie_embeddings=True, rope_divisors=divisors)
    assert isinstance(scaled.rope_scaling, RopeDivisors)
    expected = [
        value / by for value, by in zip(plain.rope_inverse_frequencies(), divisors, strict=True)
    ]
    assert scaled.rope_inverse_frequencies() == pytest.approx(expected)
    with pytest.raises(InvalidModel, match="8 numbers"):
        ModelConfig.from_gguf(GGUF, tie_embeddings=True, rope_divisors=[1.0] * 7)
