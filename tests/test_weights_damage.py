"""Damaged and foreign model files: one clear error that names the file, never anything else."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny_model
from tests.tiny_model import TINY, TinySpec
from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig
from tpu_engine.weights.gguf_source import GgufSource
from tpu_engine.weights.open_model import open_model
from tpu_engine.weights.safetensors_source import SafetensorsSource
from tpu_engine.weights.source import EMBEDDING, LM_HEAD, check_tensors

Weights = dict[str, Any]
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def source_of(
    folder: Path, change: Callable[[Weights], Any], spec: TinySpec = TINY
) -> SafetensorsSource:
    """A source whose weights `change` has edited."""
    weights = tiny_model.tensors(spec)
    change(weights)
    tiny_model.write_safetensors(folder, weights)
    return SafetensorsSource(folder, ModelConfig.from_hf(tiny_model.config_json(spec)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, lambda w: w.pop(UP_PROJ))
    with pytest.raises(InvalidModel, match=rf"{UP_PROJ} of shape \(128, 64\) is missing"):
        check_tensors(source, tiny_model.tensor_shapes())


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    source = source_of(tmp_path, lambda w: w.update({UP_PROJ: np.zeros((64, 128), np.float32)}))
    with pytest.raises(InvalidModel, match=rf"{UP_PROJ} .*\(64, 128\), expected \(128, 64\)"):
        check_tensors(source, tiny_model.tensor_shapes())


def test_a_surplus_tensor_is_named_but_derived_buffers_may_be_there(tmp_path: Path) -> None:
    extra = np.zeros(8, np.float32)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check_tensors(
        source_of(tmp_path, lambda w: w.update({buffer: extra})), tiny_model.tensor_shapes()
    )
    bias = "model.layers.0.self_attn.q_proj.bias"
    source = source_of(tmp_path, lambda w: w.update({bias: extra}))
    with pytest.raises(InvalidModel, match=f"{bias} .*not part of the model"):
        check_tensors(source, tiny_model.tensor_shapes())


def test_tied_embeddings_and_a_stored_head(tmp_path: Path) -> None:
    """Four cases: tied without a head, tied with an equal one, with another one, untied without."""
    tied = TinySpec(tie_embeddings=True)
    shapes = tiny_model.tensor_shapes(tied)
    check_tensors(source_of(tmp_path, lambda w: None, tied), shapes)
    check_tensors(source_of(tmp_path, lambda w: w.update({LM_HEAD: w[EMBEDDING]}), tied), shapes)
    other = source_of(tmp_path, lambda w: w.update({LM_HEAD: w[EMBEDDING] + 1}), tied)
    with pytest.raises(InvalidModel, match=f"{LM_HEAD} differs from {EMBEDDING}"):
        check_tensors(other, shapes)
    untied = source_of(tmp_path, lambda w: w.pop(LM_HEAD))
    with pytest.raises(InvalidModel, match=f"{LM_HEAD} .*missing .*does not tie"):
        check_tensors(untied, tiny_model.tensor_shapes())


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_cut_safetensors_are_refused_with_sizes(tmp_path: Path, keep: float) -> None:
    tiny_model.write_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    cut_file(path, keep)
    with pytest.raises(
        InvalidModel, match=rf"model\.safetensors: cut short: .* {path.stat().st_size} "
    ):
        open_model(tmp_path)


@pytest.mark.parametrize("keep", [24, 100, 0.5, -1])
def test_cut_gguf_is_refused_with_sizes(tmp_path: Path, keep: float) -> None:
    path = tiny_model.write_gguf(tmp_path / "tiny.gguf")
    cut_file(path, keep)
    with pytest.raises(InvalidModel, match=rf"tiny\.gguf: cut short.* {path.stat().st_size}( |$)"):
        open_model(path)


def cut_file(path: Path, keep: float) -> None:
    """Keeps `keep` bytes, a share of them (0.5), or all but some (negative)."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(40)])
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match="not a GGUF file"):
        open_model(path)


def test_unknown_gguf_versions_and_types_are_named(tmp_path: Path) -> None:
    path = tiny_model.write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    with pytest.raises(InvalidModel, match="version 9"):
        open_model(path)
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + struct.pack("<I", int(Kind.IQ2_XXS)) + data[at + 4 :])
    with pytest.raises(InvalidModel, match=r"ffn_up.*(IQ2_XXS|multiple)"):
        open_model(path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    return tiny_model.write_gguf(path, TinySpec(num_layers=1), Kind.Q8_0).read_bytes()


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_a_damaged_gguf_header_opens_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, gguf_bytes: bytes, changes: list[tuple[float, int]]
) -> None:
    data, header = bytearray(gguf_bytes), gguf_bytes.index(b"blk.0.ffn_down") + 200
    for place, value in changes:
        data[int(place * header)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(data)
    with contextlib.suppress(InvalidModel):
        source = GgufSource(path)
        for name in source.names():
            source.read(name)


def test_a_shard_that_is_missing_or_at_odds_with_the_index(tmp_path: Path) -> None:
    tiny_model.write_hf(tmp_path, num_shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index_path.read_text())["weight_map"]
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == first)
    for changed, named in (
        ({**weight_map, moved: second}, f"{moved} is"),
        ({k: v for k, v in weight_map.items() if k != moved}, f"{moved} is here"),
        ({**weight_map, moved: "../" + first}, "file of this folder"),
        ({**weight_map, moved: 3}, "file of this folder"),
        ([], "weight_map"),
    ):
        tiny_model.write_json(index_path, {"weight_map": changed})
        with pytest.raises(InvalidModel, match=named):
            open_model(tmp_path)
    tiny_model.write_json(index_path, {"weight_map": weight_map})
    (tmp_path / second).unlink()
    with pytest.raises(InvalidModel, match=f"{second}: the weight file is missing"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("file_name", "content", "named"),
    [
        ("config.json", None, "config.json: the file is missing"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: must hold a JSON object"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature"),
        ("tokenizer.json", None, "tokenizer.json: the file is missing"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json: not a usable tokenizer"),
        ("tokenizer.json", '{"model":', "tokenizer.json: not a usable tokenizer"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template: not valid"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be"),
        ("model.safetensors", None, "neither model.safetensors nor"),
    ],
)
def test_damaged_parts_of_a_directory_are_named(
    tmp_path: Path, file_name: str, content: str | None, named: str
) -> None:
    tiny_model.write_hf(tmp_path)
    (tmp_path / file_name).unlink()
    if content is not None:
        (tmp_path / file_name).write_text(content)
    with pytest.raises(InvalidModel, match=named):
        open_model(tmp_path)


def test_unsupported_safetensors_dtypes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=f"{UP_PROJ} has dtype I8, supported: F32, F16, BF16"):
        source_of(tmp_path, lambda w: w.update({UP_PROJ: np.zeros((128, 64), np.int8)}))
