"""Weight sources give back what was stored, whole or in slices, whatever the format."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny_model
from tests.tiny_model import TINY, TinySpec
from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig
from tpu_engine.weights.gguf_header import read_header
from tpu_engine.weights.gguf_source import SUPPORTED_TYPES, GgufSource
from tpu_engine.weights.safetensors_source import SafetensorsSource
from tpu_engine.weights.source import TensorSource, check_tensors

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def hf_source(directory: Path, spec: TinySpec = TINY, num_shards: int = 1) -> SafetensorsSource:
    tiny_model.write_hf(directory, spec, num_shards)
    return SafetensorsSource(directory, ModelConfig.from_hf(tiny_model.config_json(spec)))


@pytest.fixture(scope="module", params=["single", "sharded", "gguf"])
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TensorSource:
    folder = tmp_path_factory.mktemp("tiny")
    if request.param == "gguf":
        return GgufSource(tiny_model.write_gguf(folder / "tiny.gguf"))
    return hf_source(folder, num_shards=3 if request.param == "sharded" else 1)


def test_every_tensor_is_read_back_exactly(source: TensorSource) -> None:
    check_tensors(source, tiny_model.tensor_shapes())
    for name, expected in tiny_model.tensors().items():
        assert source.shape(name) == expected.shape
        assert source.dtype(name) == np.float32
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)


@given(data=st.data(), name=st.sampled_from(sorted(tiny_model.tensor_shapes())))
@settings(max_examples=60, deadline=None)
def test_any_slice_is_the_slice_of_the_whole(
    source: TensorSource, data: st.DataObject, name: str
) -> None:
    shape = source.shape(name)
    index: list[slice] = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.none() | st.integers(0, size))
        index.append(slice(start, data.draw(st.none() | st.integers(start or 0, size))))
    got = source.read(name, tuple(index))
    np.testing.assert_array_equal(got, tiny_model.tensors()[name][tuple(index)])


@pytest.mark.parametrize(
    "index",
    [(slice(0, 33),), (slice(-1, None),), (slice(0, 8, 2),), (slice(8, 4),), (slice(None),) * 3],
)
def test_an_index_outside_the_tensor_is_refused(
    source: TensorSource, index: tuple[slice, ...]
) -> None:
    with pytest.raises(InvalidModel, match=K_PROJ):
        source.read(K_PROJ, index)


def test_an_unknown_tensor_is_refused(source: TensorSource) -> None:
    with pytest.raises(InvalidModel, match="no tensor nothing"):
        source.read("nothing")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)],
)
def test_safetensors_dtypes(tmp_path: Path, stored: str, dtype: type) -> None:
    opened = hf_source(tmp_path, TinySpec(dtype=stored))
    expected = tiny_model.tensors()[K_PROJ].astype(dtype)
    for got in (opened.read(K_PROJ), opened.read(K_PROJ, (slice(0, 32), slice(0, 64)))):
        assert got.dtype == opened.dtype(K_PROJ) == dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F16, 1e-3),
        (Kind.BF16, 1e-2),
        (Kind.Q8_0, 0.01),
        (Kind.Q5_0, 0.06),
        (Kind.Q5_1, 0.06),
        (Kind.Q4_0, 0.12),
        (Kind.Q4_1, 0.12),
    ],
)
def test_gguf_types_are_decoded(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    opened = GgufSource(tiny_model.write_gguf(tmp_path / "tiny.gguf", kind=kind))
    for name, expected in tiny_model.tensors().items():
        got = opened.read(name)
        assert got.dtype == opened.dtype(name)
        error = np.abs(got.astype(np.float32) - expected).max()
        assert error <= tolerance * np.abs(expected).max(), name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_gguf_k_types_are_decoded_by_rows(tmp_path: Path, kind: Kind) -> None:
    """`gguf` can't write these, so the blocks are random; each row must decode on its own."""
    spec = TinySpec(hidden_size=256, head_dim=64)
    path = tmp_path / "tiny.gguf"
    tiny_model.write_gguf(path, spec)
    raw, name = random_blocks(kind, rows=128, columns=256), "model.layers.0.mlp.up_proj.weight"
    rewrite_tensor(path, tiny_model.gguf_names(spec)[name], raw, kind)
    opened = GgufSource(path)
    assert (opened.shape(name), opened.dtype(name)) == ((128, 256), np.float32)
    np.testing.assert_array_equal(opened.read(name), gguf.quants.dequantize(raw, kind))
    part = opened.read(name, (slice(5, 6), slice(3, 9)))
    np.testing.assert_array_equal(part, gguf.quants.dequantize(raw[5:6], kind)[:, 3:9])


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random bytes, with zeros where a block holds its float16 scales (no NaN, no infinity)."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(1, 255, (rows, columns // block, block_bytes), dtype=np.uint8)
    scales = slice(-2, None) if kind is Kind.Q6_K else slice(0, 4)
    raw[..., scales] = np.full(4, 0.01, np.float16).view(np.uint8)[: raw[0, 0, scales].size]
    return raw.reshape(rows, -1)


def rewrite_tensor(path: Path, name: str, raw: np.ndarray, kind: Kind) -> None:
    """Writes the file again with one tensor's bytes replaced."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1])
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_the_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_model.write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q4_1)
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_q_and_k_rows_are_restored_but_not_v(tmp_path: Path) -> None:
    """The stored order of Q and K must differ from ours, or equality would prove little."""
    path = tiny_model.write_gguf(tmp_path / "tiny.gguf")
    stored = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
    opened = GgufSource(path)
    for part, is_same in (("q", False), ("k", False), ("v", True)):
        got = opened.read(f"model.layers.0.self_attn.{part}_proj.weight")
        assert np.array_equal(stored[f"blk.0.attn_{part}.weight"], got) is is_same
    # Row 1 of a head in half-split order is the third stored one: pairs lie side by side.
    q_proj = opened.read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(q_proj[1], stored["blk.0.attn_q.weight"][2])
    np.testing.assert_array_equal(q_proj[8], stored["blk.0.attn_q.weight"][1])


def test_opening_and_slicing_allocate_little(tmp_path: Path) -> None:
    spec = TinySpec(hidden_size=2048, head_dim=512, intermediate_size=4096, num_layers=1)
    path = tiny_model.write_gguf(tmp_path / "big.gguf", spec, Kind.Q8_0)
    name = "model.layers.0.mlp.up_proj.weight"
    tracemalloc.start()
    try:
        opened = GgufSource(path)
        opened.read(name, (slice(0, 64),))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes for a part of {64 * 2048 * 4} bytes"


def test_supported_types_are_those_promised() -> None:
    promised = "F32 F16 BF16 Q4_0 Q4_1 Q4_K Q5_0 Q5_K Q6_K Q8_0"
    assert {Kind[name] for name in promised.split()} <= set(SUPPORTED_TYPES)
