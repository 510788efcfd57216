"""Writes a model our reader can open as a float32 Hugging Face directory, for peers that need one.

    python -m benchmarks.export_hf MODEL DIRECTORY

Owns the conversion only (dequantised once, so that every engine computes with the same weights);
knows no peer. Token ids go in and out of peers, so no tokenizer is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tpu_engine.models.config import ModelConfig
from tpu_engine.weights.open_model import open_model


def export(model: str, directory: Path) -> None:
    """Writes `config.json` and `model.safetensors`; a finished directory is left as it is."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    opened = open_model(model)
    tensors = {
        name: np.ascontiguousarray(opened.source.read(name), dtype=np.float32)
        for name in opened.source.names()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # Last, so that an interrupted export is done again.
    (directory / "config.json").write_text(json.dumps(_hf_config(opened.config), indent=2))


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": sorted(config.eos_ids),
        "torch_dtype": "float32",
    }


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))
