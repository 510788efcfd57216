"""The compile cache on real (small) programs: reuse, freezing, damaged files."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from buckets.compile_cache import CompileCache, MissingExecutable
from buckets.shape import StepShape

SHAPES = [StepShape(n, 1, 1, 1) for n in (2, 3)]


def lower(shape: StepShape) -> jax.stages.Lowered:
    argument = jax.ShapeDtypeStruct((shape.num_tokens,), jnp.float32)
    return jax.jit(lambda x: {"sum": x.sum(), "twice": x * 2}).lower(argument)


def build(directory: Path | None, lowering=lower) -> tuple[CompileCache, list[str]]:
    cache = CompileCache(lowering, directory)
    return cache, [record.source for record in cache.build(SHAPES)]


def result(cache: CompileCache, shape: StepShape) -> float:
    return float(cache.get(shape)(jnp.ones(shape.num_tokens))["sum"])


def test_second_process_loads_instead_of_compiling(tmp_path: Path) -> None:
    first, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]
    assert first.compile_count == 2
    second, sources = build(tmp_path)
    assert sources == ["loaded", "loaded"]
    assert second.compile_count == 0
    assert [result(second, shape) for shape in SHAPES] == [2.0, 3.0]


def test_build_twice_does_nothing() -> None:
    cache, _ = build(None)
    assert list(cache.build(SHAPES)) == []
    assert len(cache.records) == 2


def test_frozen_cache_never_compiles() -> None:
    cache, _ = build(None)
    cache.freeze()
    with pytest.raises(MissingExecutable):
        cache.get(StepShape(4, 1, 1, 1))
    with pytest.raises(MissingExecutable):
        list(cache.build([StepShape(4, 1, 1, 1)]))
    assert cache.compile_count == 2


def test_another_program_is_not_mistaken_for_a_stored_one(tmp_path: Path) -> None:
    build(tmp_path)

    def other(shape: StepShape) -> jax.stages.Lowered:
        argument = jax.ShapeDtypeStruct((shape.num_tokens,), jnp.float32)
        return jax.jit(lambda x: {"sum": x.sum() + 1, "twice": x * 2}).lower(argument)

    cache, sources = build(tmp_path, other)
    assert sources == ["compiled", "compiled"]
    assert result(cache, SHAPES[0]) == 3.0


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip"])
def test_damaged_file_is_set_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    build(tmp_path)
    for path in tmp_path.glob("*.executable"):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
        path.write_bytes(content[: {"truncate": 500, "empty": 0, "flip": None}[damage]])
    cache = CompileCache(lower, tmp_path)
    records = list(cache.build(SHAPES))
    assert [record.source for record in records] == ["compiled", "compiled"]
    assert all("set aside" in record.note for record in records)
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    assert [result(cache, shape) for shape in SHAPES] == [2.0, 3.0]
    assert build(tmp_path)[1] == ["loaded", "loaded"]


def test_foreign_content_with_a_right_checksum_is_set_aside(tmp_path: Path) -> None:
    import hashlib

    build(tmp_path)
    payload = b"not an executable"
    for path in tmp_path.glob("*.executable"):
        path.write_bytes(hashlib.sha256(payload).digest() + payload)
    _, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]


def test_a_folder_that_can_not_be_written_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    first, second = sorted(tmp_path.glob("*.executable"))
    second.write_bytes(b"damaged")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    cache = CompileCache(lower, tmp_path)
    records = list(cache.build(SHAPES))
    assert sorted(record.source for record in records) == ["compiled", "loaded"]
    note = "".join(record.note for record in records)
    assert "can't be set aside: Read-only" in note
    assert "not stored: Read-only" in note
    assert [result(cache, shape) for shape in SHAPES] == [2.0, 3.0]
    assert first.exists()


def test_a_failed_write_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    records = list(CompileCache(lower, tmp_path).build(SHAPES))
    assert {record.note for record in records} == {"not stored: No space left on device"}
    assert list(tmp_path.iterdir()) == []
