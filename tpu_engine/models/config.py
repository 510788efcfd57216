"""The shape and constants of a Llama-architecture model, read from a checkpoint's own metadata.

Owns `ModelConfig`, its checks, and the reading of Hugging Face `config.json` and of GGUF metadata.
Whatever the model code can't honour is refused here by name. Doesn't know files, arrays or JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tpu_engine.errors import InvalidModel

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
ROPE_TYPES = ("default", "llama3")
ACTIVATIONS = ("silu",)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """The `llama3` rule: slow frequencies are divided by `factor`, fast ones kept, others mixed.

    `original_max_len` is the length in tokens the model was first trained at.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_len"):
            _positive(f"rope {name}", getattr(self, name))
        if self.low_freq_factor >= self.high_freq_factor:
            limit = f"below high_freq_factor ({self.high_freq_factor:g})"
            raise _refusal("rope low_freq_factor", limit, self.low_freq_factor)

    def divisor(self, inverse_frequency: float) -> float:
        """By how much this frequency (radians per position) is divided."""
        turns = self.original_max_len * inverse_frequency / (2 * math.pi)
        if turns < self.low_freq_factor:
            return self.factor
        if turns > self.high_freq_factor:
            return 1.0
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1.0 / ((1.0 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """Scaling stored as H/2 numbers, one divisor per frequency (GGUF `rope_freqs.weight`)."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for value in self.divisors:
            _positive("rope divisor", value)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model code needs to know; raises `InvalidModel` where the numbers can't be right.

    Attributes:
        architecture: "llama".
        max_model_len: tokens the model was trained for (prompt plus output).
        bos_id: token that begins a text, or None.
        eos_ids: tokens that end an answer; see `from_hf` for the rule.
        dtype: of the published weights ("float32", "float16", "bfloat16"), or None if not stated.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    rope_scaling: Llama3RopeScaling | RopeDivisors | None = None
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    hidden_act: str = "silu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _positive(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            limit = f"a divisor of num_heads ({self.num_heads})"
            raise _refusal("num_kv_heads", limit, self.num_kv_heads)
        if self.head_dim % 2:
            raise _refusal("head_dim", "even", self.head_dim)
        _one_of("hidden_act", self.hidden_act, ACTIVATIONS)
        scaling = self.rope_scaling
        if isinstance(scaling, RopeDivisors) and len(scaling.divisors) != self.head_dim // 2:
            limit = f"{self.head_dim // 2} numbers (head_dim / 2)"
            raise _refusal("rope divisors", limit, len(scaling.divisors))
        named_ids = {"bos_id": self.bos_id} | {f"eos id {i}": i for i in self.eos_ids}
        for name, token_id in named_ids.items():
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise _refusal(name, f"below vocab_size ({self.vocab_size})", token_id)

    def rope_inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the H/2 rotated pairs, scaling applied."""
        exponents = (2 * pair / self.head_dim for pair in range(self.head_dim // 2))
        plain = tuple(self.rope_theta**-exponent for exponent in exponents)
        match self.rope_scaling:
            case None:
                return plain
            case Llama3RopeScaling() as rule:
                return tuple(value / rule.divisor(value) for value in plain)
            case RopeDivisors(divisors):
                return tuple(value / by for value, by in zip(plain, divisors, strict=True))

    @classmethod
    def from_hf(
        cls,
        config_json: Mapping[str, object],
        generation_config: Mapping[str, object] | None = None,
    ) -> ModelConfig:
        """Reads a Hugging Face `config.json` and, when there is one, `generation_config.json`.

        Old (`rope_theta`, `rope_scaling`, `torch_dtype`) and new (`rope_parameters`, `dtype`)
        spellings are accepted. `eos_ids` is the union of `eos_token_id` of both files: an answer
        ends at a token that either names. `bos_id` is the generation config's, else the config's.
        Raises `InvalidModel` naming the field and what is supported.
        """
        return _from_hf(_Fields(config_json), _Fields(generation_config or {}))

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        *,
        tie_embeddings: bool,
        rope_divisors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Reads GGUF metadata (key to value, arrays as lists).

        `tie_embeddings` says that the file has no output matrix of its own, `rope_divisors` are
        the numbers of its `rope_freqs.weight`. `eos_ids` is the union of the file's eos, eot and
        eom tokens. Raises `InvalidModel` naming the key and what is supported.
        """
        return _from_gguf(_Fields(metadata), tie_embeddings, rope_divisors)


_COUNTS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_model_len",
)
_DEFAULT_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3_ROPE_KEYS = (
    *_DEFAULT_ROPE_KEYS,
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
# Hugging Face fields that change the computation, with the only values the model code computes.
_HF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
}
# The same for GGUF keys below "llama.".
_GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.type": (None, "none"),
    "attention.causal": (None, True),
    "attention.sliding_window": (None, 0),
    "attention.scale": (None, 0.0),
    "attention.clamp_kqv": (None, 0.0),
    "use_parallel_residual": (None, False),
    "expert_count": (None, 0),
    "logit_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
}


def _from_hf(config: _Fields, generation: _Fields) -> ModelConfig:
    names = config.get("architectures")
    architectures = cast(list[object], names) if isinstance(names, list) else [names]
    for architecture in architectures or [None]:
        _one_of("architectures", architecture, HF_ARCHITECTURES)
    _refuse_unless_neutral(config, "", _HF_NEUTRAL)
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None:
        _one_of("dtype", dtype, DTYPES)
    theta, scaling = _hf_rope(config)
    return ModelConfig(
        architecture="llama",
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", num_heads),
        head_dim=config.count("head_dim", _default_head_dim(hidden_size, num_heads)),
        vocab_size=config.count("vocab_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_model_len=config.count("max_position_embeddings"),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        bos_id=next(iter((*generation.ids("bos_token_id"), *config.ids("bos_token_id"))), None),
        eos_ids=frozenset((*generation.ids("eos_token_id"), *config.ids("eos_token_id"))),
        hidden_act=cast(str, config.get("hidden_act") or "silu"),
        dtype=cast(str | None, dtype),
    )


def _hf_rope(config: _Fields) -> tuple[float, Llama3RopeScaling | None]:
    spelling = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    values = config.get(spelling)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise _refusal(spelling, "an object", values)
    rope = _Fields(cast(dict[str, object], values), spelling + ".")
    kinds = {kind for kind in (rope.get("rope_type"), rope.get("type")) if kind is not None}
    kind = kinds.pop() if kinds else "default"
    _one_of(rope.prefix + "rope_type", kind, ROPE_TYPES)
    if kinds:
        raise _refusal(rope.prefix + "type", f"the same as rope_type ({kind!r})", kinds.pop())
    _refuse_unless_neutral(rope, "", {"partial_rotary_factor": (None, 1, 1.0)})
    known = _LLAMA3_ROPE_KEYS if kind == "llama3" else _DEFAULT_ROPE_KEYS
    for key in sorted(set(rope.values).difference(known)):
        raise _refusal(rope.prefix + key, f"absent for rope type {kind!r}", rope.get(key))
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    return theta, Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_len=rope.count("original_max_position_embeddings"),
    )


def _from_gguf(
    metadata: _Fields, tie_embeddings: bool, rope_divisors: Sequence[float] | None
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    _one_of("general.architecture", architecture, GGUF_ARCHITECTURES)
    _refuse_unless_neutral(metadata, "llama.", _GGUF_NEUTRAL)
    hidden_size = metadata.count("llama.embedding_length")
    num_heads = metadata.count("llama.attention.head_count")
    head_dim = metadata.count(
        "llama.attention.key_length", _default_head_dim(hidden_size, num_heads)
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise _refusal(key, f"the head size ({head_dim})", metadata.get(key))
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(cast(list[object], tokens)) if isinstance(tokens, list) else None
    eos_names = ("eos", "eot", "eom")
    return ModelConfig(
        architecture="llama",
        num_layers=metadata.count("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=metadata.count("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.count("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=metadata.count("llama.vocab_size", num_tokens),
        rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number("llama.rope.freq_base", 10000.0),
        rope_scaling=None if rope_divisors is None else RopeDivisors(tuple(rope_divisors)),
        max_model_len=metadata.count("llama.context_length"),
        tie_embeddings=tie_embeddings,
        bos_id=next(iter(metadata.ids("tokenizer.ggml.bos_token_id")), None),
        eos_ids=frozenset(
            token_id
            for name in eos_names
            for token_id in metadata.ids(f"tokenizer.ggml.{name}_token_id")
        ),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed look-ups in untyped metadata; `prefix` names the place in error messages."""

    values: Mapping[str, object]
    prefix: str = ""

    def get(self, key: str) -> object:
        return self.values.get(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refusal(self.prefix + key, "a number", value)
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refusal(self.prefix + key, "an integer", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise _refusal(self.prefix + key, "true or false", value)
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids written as nothing, one integer or a list of integers."""
        value = self.get(key)
        if value is None:
            return ()
        ids = cast(list[object], value) if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise _refusal(self.prefix + key, "a token id or a list of them", token_id)
        return tuple(cast(list[int], ids))


def _default_head_dim(hidden_size: int, num_heads: int) -> int | None:
    divides = num_heads > 0 and hidden_size % num_heads == 0
    return hidden_size // num_heads if divides else None


def _refuse_unless_neutral(
    fields: _Fields, prefix: str, neutral: Mapping[str, tuple[object, ...]]
) -> None:
    for key, allowed in neutral.items():
        if fields.get(prefix + key) not in allowed:
            limit = "absent" if allowed == (None,) else f"absent or {allowed[-1]!r}"
            raise _refusal(fields.prefix + prefix + key, limit, fields.get(prefix + key))


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise _refusal(name, "positive and finite", value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refusal(name, "one of " + ", ".join(allowed), value)


def _refusal(name: str, limit: str, given: object) -> InvalidModel:
    return InvalidModel(f"model config: {name} must be {limit}, got {given!r}")
