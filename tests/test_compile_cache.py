"""The compile cache on real (small) programs: reuse, freezing, refusals, forbidden compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from buckets import executable
from buckets.cache_store import CacheStore, Stored
from buckets.compile_cache import CompileCache, MissingExecutable, NotWarm
from buckets.executable import ExecutableSource, load_executable
from buckets.shape import StepShape
from tests.small_programs import SHAPES, SmallPrograms, one_more

OTHER = StepShape(4, 1, 1, 1)


def build(
    directory: Path | None, programs: SmallPrograms | None = None
) -> tuple[CompileCache, list[str]]:
    store = None if directory is None else CacheStore(directory)
    cache = CompileCache(programs or SmallPrograms(), store)
    return cache, [record.source for record in cache.build(SHAPES)]


def results(cache: CompileCache) -> list[float]:
    return [float(cache.get(shape)(jnp.ones(shape.num_tokens))["sum"]) for shape in SHAPES]


def entry_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("entries/*.executable"))


def test_second_start_loads_and_lowers_nothing(tmp_path: Path) -> None:
    first, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]
    assert first.compile_count == 2
    programs = SmallPrograms()
    second, sources = build(tmp_path, programs)
    assert sources == ["loaded", "loaded"]
    assert (second.compile_count, second.load_count, programs.lowered) == (0, 2, [])
    assert results(second) == [2.0, 3.0]


def test_changed_source_with_the_same_program_is_lowered_and_loaded(tmp_path: Path) -> None:
    build(tmp_path)
    programs = SmallPrograms(source="2")
    assert build(tmp_path, programs)[1] == ["loaded", "loaded"]
    assert programs.lowered == SHAPES
    programs = SmallPrograms(source="2")
    assert build(tmp_path, programs)[1] == ["loaded", "loaded"]
    assert programs.lowered == []


def test_another_program_is_not_mistaken_for_a_stored_one(tmp_path: Path) -> None:
    build(tmp_path)
    cache, sources = build(tmp_path, SmallPrograms(one_more))
    assert sources == ["compiled", "compiled"]
    assert results(cache) == [3.0, 4.0]


def test_other_compiler_options_are_another_executable(tmp_path: Path) -> None:
    build(tmp_path)
    options = {"xla_embed_ir_in_executable": True}
    assert build(tmp_path, SmallPrograms(options=options))[1] == ["compiled", "compiled"]
    assert len(entry_files(tmp_path)) == 4


def test_an_option_the_compiler_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        build(tmp_path, SmallPrograms(options={"no_such_option": True}))


def test_facts_survive_the_disk(tmp_path: Path) -> None:
    first, _ = build(tmp_path)
    second, _ = build(tmp_path)
    facts = [record.facts for record in first.records]
    assert [record.facts for record in second.records] == facts
    assert facts[0] is not None
    assert facts[0].argument_bytes == 8
    assert facts[0].compile_s > 0


def test_build_twice_does_nothing() -> None:
    cache, _ = build(None)
    assert list(cache.build(SHAPES)) == []
    assert len(cache.records) == 2


def test_programs_may_be_compiled_side_by_side(tmp_path: Path) -> None:
    shapes = [StepShape(n, 1, 1, 1) for n in range(1, 9)]
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path), jobs=4)
    records = list(cache.build(shapes))
    assert {record.shape for record in records} == set(shapes)
    assert cache.warm_shapes == set(shapes)
    assert len(CacheStore(tmp_path).entries()) == 8


def test_frozen_cache_builds_what_is_planned_and_nothing_else() -> None:
    cache, _ = build(None)
    cache.freeze()
    with pytest.raises(MissingExecutable):
        cache.get(OTHER)
    with pytest.raises(MissingExecutable):
        list(cache.build([OTHER]))
    assert cache.compile_count == 2
    cache.plan([OTHER])
    assert [record.source for record in cache.build([OTHER])] == ["compiled"]


def test_a_miss_is_built_only_when_asked_for_by_name() -> None:
    cache, _ = build(None)
    cache.freeze()
    assert cache.build_missing(OTHER).source == "compiled"
    assert OTHER in cache.warm_shapes


def test_released_executables_are_missing() -> None:
    cache, _ = build(None)
    cache.release(SHAPES[:1])
    with pytest.raises(MissingExecutable):
        cache.get(SHAPES[0])
    assert cache.warm_shapes == {SHAPES[1]}


def test_others_may_get_while_one_thread_builds() -> None:
    cache, _ = build(None)
    shapes = [StepShape(n, 1, 1, 1) for n in range(4, 20)]
    builder = threading.Thread(target=lambda: list(cache.build(shapes)))
    builder.start()
    while builder.is_alive():
        assert results(cache) == [2.0, 3.0]
    assert cache.warm_shapes == {*SHAPES, *shapes}


def damage(directory: Path) -> None:
    for path in entry_files(directory):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_damaged_entries_are_named_set_aside_and_rebuilt(tmp_path: Path) -> None:
    build(tmp_path)
    damage(tmp_path)
    cache, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]
    assert all("checksum" in r.note and "set aside" in r.note for r in cache.records)
    assert results(cache) == [2.0, 3.0]
    assert build(tmp_path)[1] == ["loaded", "loaded"]


def test_a_payload_that_is_no_executable_is_set_aside(tmp_path: Path) -> None:
    build(tmp_path)
    store = CacheStore(tmp_path)
    for info in store.entries().values():
        store.write(info.key, b"whole, and no executable", info.facts)
    cache, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]
    assert all("can't be unpickled" in record.note for record in cache.records)


def test_require_warm_compiles_nothing_and_names_every_shape(tmp_path: Path) -> None:
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path), require_warm=True)
    with pytest.raises(NotWarm) as error:
        list(cache.build(SHAPES))
    assert list(error.value.reasons) == SHAPES
    assert "not in the cache" in str(error.value)
    assert cache.compile_count == 0
    with pytest.raises(NotWarm):
        cache.build_missing(OTHER)


def test_require_warm_serves_a_warm_cache_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    build(tmp_path)
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path), require_warm=True)
    assert [record.source for record in cache.build(SHAPES)] == ["loaded", "loaded"]
    damage(tmp_path)
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path), require_warm=True)
    with pytest.raises(NotWarm, match="checksum"):
        list(cache.build(SHAPES))


def built_elsewhere(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache from another machine, whose executables this device won't load."""
    mark = b" built for another machine"
    build(directory)
    store = CacheStore(directory)
    for digest, info in store.entries().items():
        stored = store.read(digest)
        assert isinstance(stored, Stored)
        store.write(info.key, stored.payload + mark, info.facts)  # pickles end where they end

    def load(payload: bytes, *rest: Any) -> jax.stages.Compiled:
        if payload.endswith(mark):
            raise jax.errors.JaxRuntimeError("INTERNAL: built for another machine")
        return load_executable(payload, *rest)

    monkeypatch.setattr(executable, "load_executable", load)


def test_refused_executables_are_rebuilt_under_a_key_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_elsewhere(tmp_path, monkeypatch)
    before = entry_files(tmp_path)
    cache, sources = build(tmp_path)
    assert sources == ["compiled", "compiled"]
    assert all("this device refused it" in record.note for record in cache.records)
    assert results(cache) == [2.0, 3.0]
    # Others of its kind may still want the first ones.
    assert set(before) < set(entry_files(tmp_path))
    assert len(entry_files(tmp_path)) == 4
    again, sources = build(tmp_path)
    assert sources == ["loaded", "loaded"]
    assert all("built for another machine" in record.note for record in again.records)


def test_refused_executables_are_no_start_where_a_warm_cache_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_elsewhere(tmp_path, monkeypatch)
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path), require_warm=True)
    with pytest.raises(NotWarm, match="built for another machine"):
        list(cache.build(SHAPES))


def test_a_warm_up_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(executable, "load_executable", None)
        source = ExecutableSource(SmallPrograms(), CacheStore(tmp_path))
        assert source.stored_facts(SHAPES) == {}
        record, is_new = source.compile_missing(SHAPES[0])
        assert (record.source, is_new) == ("compiled", True)
        assert source.compile_missing(SHAPES[0])[1] is False
        assert source.stored_facts(SHAPES) == {SHAPES[0]: record.facts}
    cache = CompileCache(SmallPrograms(), CacheStore(tmp_path))
    assert [record.source for record in cache.build(SHAPES)] == ["loaded", "compiled"]


WITH_JAX_CACHE = """
import sys
import jax.numpy as jnp
from buckets.cache_store import CacheStore
from buckets.compile_cache import CompileCache
from tests.small_programs import SHAPES, SmallPrograms

jnp.ones(3) + 1  # JAX's cache is in use before ours is opened
cache = CompileCache(SmallPrograms(), CacheStore(sys.argv[1]))
sources = [record.source for record in cache.build(SHAPES[:1])]
print(sources[0], cache.get(SHAPES[0])(jnp.ones(2))["sum"])
"""


def test_what_jax_has_in_its_own_cache_is_not_stored(tmp_path: Path, repo_root: Path) -> None:
    variables = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(repo_root),
    }

    def run(code: str, *words: str) -> str:
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(
            command, env=variables, cwd=repo_root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    warm_jax = (
        "from tests.small_programs import *\n"
        "SmallPrograms().lower(SHAPES[0]).compile(compiler_options=None)"
    )
    run(warm_jax)
    assert list((tmp_path / "jax").iterdir())
    assert run(WITH_JAX_CACHE, str(tmp_path / "ours")) == "compiled 2.0"
    assert run(WITH_JAX_CACHE, str(tmp_path / "ours")) == "loaded 2.0"
