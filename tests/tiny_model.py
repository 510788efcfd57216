"""A random Llama small enough for any test, written as a Hugging Face directory or a GGUF file.

Owns the tiny architecture, its seeded weights and its byte-level tokenizer; both formats hold the
same numbers and the same vocabulary. Knows nothing of the engine: it is built with the formats'
own libraries, so that reading it back tests the engine's readers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[Any]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    " the of and to in is that for it as was with be by on not he his but at are this have from"
    " or had an they which one you were all her she there would their we him been has when who"
    " will no more if out so up said what its about than into them can only other time new some"
    " could these two may first then do any like my now over such our man me even most made"
    " after also did many off before must well back through years much where your way down"
    " should because long each just state those people too mister how little good world make"
    " very year still see own work men day get here between both under never same know another"
    " while last might us great old go come"
)


@dataclass(frozen=True)
class TinySpec:
    """Sizes of the tiny model; `dtype` is what a Hugging Face directory stores."""

    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 512
    max_model_len: int = 1024
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    dtype: str = "float32"
    seed: int = 0


TINY = TinySpec()


def tensor_shapes(spec: TinySpec = TINY) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes (`[out, in]`) of all tensors."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for number in range(spec.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def tensors(spec: TinySpec = TINY) -> dict[str, Array]:
    """The seeded weights, float32; scaled so that logits differ clearly from token to token."""
    rng = np.random.default_rng(spec.seed)
    weights: dict[str, Array] = {}
    for name, shape in tensor_shapes(spec).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            weights[name] = 1 + noise / 10
        elif shape[0] == spec.vocab_size:
            weights[name] = noise / 4
        else:
            weights[name] = noise / np.float32(shape[1] ** 0.5)
    return weights


def tokenizer(spec: TinySpec = TINY) -> Tokenizer:
    """Byte-level BPE: three special tokens, 256 bytes, then beginnings of common words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*SPECIAL_TOKENS, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in _CORPUS.split():
        spelled = "\u0120" + word
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab and len(vocab) < spec.vocab_size:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    if len(vocab) != spec.vocab_size:
        raise ValueError(f"vocab_size must be from 259 to {len(vocab)}, got {spec.vocab_size}")
    built: Any = Tokenizer(models.BPE(vocab, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in SPECIAL_TOKENS]
    )
    return built


def config_json(spec: TinySpec = TINY) -> dict[str, Any]:
    """The `config.json` of the tiny model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": spec.dtype,
    }


def write_hf(directory: Path, spec: TinySpec = TINY, num_shards: int = 1) -> Path:
    """Writes a Hugging Face directory (created if need be) and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    generation_config = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, 0]}
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "config.json", config_json(spec))
    write_json(directory / "generation_config.json", generation_config)
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    tokenizer(spec).save(str(directory / "tokenizer.json"))
    stored = np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)
    write_safetensors(
        directory, {k: v.astype(stored) for k, v in tensors(spec).items()}, num_shards
    )
    return directory


def write_safetensors(directory: Path, weights: dict[str, Array], num_shards: int = 1) -> None:
    """Writes `model.safetensors`, or shards with their index."""
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = list(weights)[shard::num_shards]
        save_file({name: weights[name] for name in names}, directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})


def write_gguf(
    path: Path,
    spec: TinySpec = TINY,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes the same model as GGUF, matrices stored as `kind` (one that `gguf` can quantise)."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_gguf_metadata(writer, spec)
    names = gguf_names(spec)
    for name, weight in tensors(spec).items():
        stored_as = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(_llama_cpp_rows(name, weight, spec), stored_as)
        writer.add_tensor(names[name], stored, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names(spec: TinySpec = TINY) -> dict[str, str]:
    """llama.cpp's name of each tensor, by the `gguf` package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    found = {name: table.get_name(name, (".weight",)) for name in tensor_shapes(spec)}
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def _llama_cpp_rows(name: str, weight: Array, spec: TinySpec) -> Array:
    """Rows of Q and K as llama.cpp stores them: the two of each rotated pair side by side."""
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, spec.head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _add_gguf_metadata(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    writer.add_name("tiny")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(spec.vocab_size)
    built = tokenizer(spec)
    pieces = sorted(built.get_vocab(), key=built.get_vocab().__getitem__)
    merges = json.loads(built.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece in SPECIAL_TOKENS else 1 for piece in pieces])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as JSON."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
