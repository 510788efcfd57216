"""GGUF files of Llama models as a `TensorSource`.

Owns the translation from llama.cpp's conventions to Hugging Face's: tensor names, the order of
the rows of Q and K, and blocks of quantised numbers to float32. Knows nothing of devices; the
container format is `gguf_header`'s, the block formats are the `gguf` package's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig
from tpu_engine.weights.gguf_header import GgufHeader, GgufTensor, read_header
from tpu_engine.weights.source import Array, Index, checked_index, row_blocks

_KIND = GGMLQuantizationType
_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    _KIND.F32: np.dtype(np.float32),
    _KIND.F16: np.dtype(np.float16),
    _KIND.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = (
    _KIND.Q4_0,
    _KIND.Q4_1,
    _KIND.Q5_0,
    _KIND.Q5_1,
    _KIND.Q8_0,
    _KIND.Q4_K,
    _KIND.Q5_K,
    _KIND.Q6_K,
)
SUPPORTED_TYPES = (*_PLAIN, *_QUANTISED)

_ROPE_DIVISORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Small enough to stay in a core's cache: several times faster than whole tensors.
_DEQUANTISED_BYTES = 1 << 19


class GgufSource:
    """One mapped GGUF file. Raises `InvalidModel` at construction where the file can't be used."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._path = path
        self.metadata = header.metadata
        self._tensors = _renamed(path, header)
        self._bytes = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self._config = ModelConfig.from_gguf(
            header.metadata,
            tie_embeddings="output.weight" not in header.tensors,
            rope_divisors=self._rope_divisors(header),
        )
        self._row_orders = {
            "q_proj.weight": _half_split_order(self._config.num_heads, self._config.head_dim),
            "k_proj.weight": _half_split_order(self._config.num_kv_heads, self._config.head_dim),
        }

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return _PLAIN.get(self._tensor(name).kind, np.dtype(np.float32))

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorSource.read`; memory beyond the result stays below about 4 MiB."""
        tensor = self._tensor(name)
        full = checked_index(name, tensor.shape, index)
        if len(tensor.shape) == 1:
            return self._values(tensor)[full[0]]
        if len(tensor.shape) != 2:
            raise InvalidModel(f"{self._path}: tensor {name} of shape {tensor.shape} is no matrix")
        order = self._row_orders.get(".".join(name.split(".")[-2:]))
        if order is not None and len(order) != tensor.shape[0]:
            raise InvalidModel(f"tensor {name} has {tensor.shape[0]} rows, expected {len(order)}")
        stored = self._stored_rows(tensor)
        rows, columns = full
        if tensor.kind in _PLAIN and order is None:
            return stored.view(_PLAIN[tensor.kind])[rows, columns]
        result = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.dtype(name))
        for block in row_blocks(rows, 4 * tensor.shape[1], _DEQUANTISED_BYTES):
            raw = stored[block] if order is None else stored[order[block]]
            part = slice(block.start - rows.start, block.stop - rows.start)
            result[part] = _decoded(raw, tensor.kind)[:, columns]
        return result

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise InvalidModel(f"{self._path}: there is no tensor {name}")
        return self._tensors[name]

    def _stored_rows(self, tensor: GgufTensor) -> Array:
        stored = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return stored.reshape(tensor.shape[0], tensor.row_bytes)

    def _values(self, tensor: GgufTensor) -> Array:
        stored = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return _decoded(stored, tensor.kind)

    def _rope_divisors(self, header: GgufHeader) -> list[float] | None:
        tensor = header.tensors.get(_ROPE_DIVISORS)
        return None if tensor is None else self._values(tensor).astype(np.float64).tolist()


def _renamed(path: Path, header: GgufHeader) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if tensor.kind not in SUPPORTED_TYPES:
            supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
            raise InvalidModel(
                f"{path}: tensor {name} has type {tensor.kind.name}, supported: {supported}"
            )
        if name != _ROPE_DIVISORS:
            tensors[_hf_name(name)] = tensor
    return tensors


def _hf_name(name: str) -> str:
    """The Hugging Face name; an unknown one stays as it is (and is refused as surplus later)."""
    layer = _LAYER_PATTERN.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{int(layer[1])}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name


def _half_split_order(num_heads: int, head_dim: int) -> Array:
    """For each row of Q or K in half-split RoPE order, the row of the file that holds it.

    llama.cpp stores the two rows of a rotated pair side by side, Hugging Face head_dim/2 apart.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _decoded(raw: Array, kind: GGMLQuantizationType) -> Array:
    """Stored bytes `[..., row bytes]` as numbers `[..., row]`."""
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    # The scales of a damaged block may be infinite or NaN; so are its weights then, without noise.
    with np.errstate(invalid="ignore", over="ignore"):
        return dequantize(raw, kind)
