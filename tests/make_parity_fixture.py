"""Writes `tests/fixtures/tiny_llama_logits.npz`: float32 logits of transformers on the tiny model.

    python -m tests.make_parity_fixture MODEL_DIR OUTPUT.npz

Needs torch and transformers (`make peers`), nothing of ours: run it with the peer's interpreter on
a directory written by `tests.tiny_model.write_hf`. Prompts are longer than a page and a KV block.
"""

from __future__ import annotations

import sys

import numpy as np


def prompts() -> list[np.ndarray]:
    """Token ids (int32) of the compared texts: 1, 40 and 150 tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, 512, size=n).astype(np.int32) for n in (1, 40, 150)]


def main(model_dir: str, output: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    arrays: dict[str, np.ndarray] = {
        "versions": np.array([torch.__version__, transformers.__version__])
    }
    for i, ids in enumerate(prompts()):
        with torch.inference_mode():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        arrays[f"ids_{i}"] = ids
        arrays[f"logits_{i}"] = logits.numpy().astype(np.float32)
    np.savez_compressed(output, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
