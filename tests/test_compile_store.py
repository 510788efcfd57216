"""Opening the store a configuration names: every way it can be wrong has a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from buckets.cache_store import CacheStore
from tpu_engine.compile_store import open_store
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig

SECRET = b"sixteen bytes or more"


def key_file(tmp_path: Path, content: bytes = SECRET, mode: int = 0o600) -> str:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    assert open_store(EngineConfig("m")) is None
    assert open_store(EngineConfig("m", compile_cache="")) is None
    interpreted = EngineConfig("m", compile_cache=str(tmp_path), attention="pallas-interpret")
    assert open_store(interpreted) is None


def test_the_folder_is_made(tmp_path: Path) -> None:
    store = open_store(EngineConfig("m", compile_cache=str(tmp_path / "a/b")))
    assert isinstance(store, CacheStore)
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize("name", ["file/below", "nosuch://bucket/folder"])
def test_a_folder_that_can_not_be_had_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    place = name if "://" in name else str(tmp_path / name)
    with pytest.raises(InvalidConfig, match="compile_cache") as error:
        open_store(EngineConfig("m", compile_cache=place))
    assert name in str(error.value)


def test_require_warm_needs_a_cache() -> None:
    for config in (
        EngineConfig("m", require_warm=True),
        EngineConfig("m", require_warm=True, compile_cache="c", attention="pallas-interpret"),
    ):
        with pytest.raises(InvalidConfig, match="require_warm"):
            open_store(config)


def test_the_signing_key_signs(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    config = EngineConfig("m", compile_cache=folder, signing_key=key_file(tmp_path, SECRET + b"\n"))
    signing = open_store(config)
    assert signing is not None
    assert signing.put_record("recipe", "ours", {"program": "p"}) == ""
    assert CacheStore(folder, SECRET).get_record("recipe", "ours") == {"program": "p"}
    CacheStore(folder).put_record("recipe", "theirs", {"program": "p"})
    assert signing.get_record("recipe", "theirs") is None


@pytest.mark.parametrize(
    ("content", "mode", "limit"),
    [(b"short", 0o600, "at least 16 bytes"), (SECRET, 0o644, "not everybody may read")],
)
def test_a_poor_key_is_refused(tmp_path: Path, content: bytes, mode: int, limit: str) -> None:
    given = key_file(tmp_path, content, mode)
    config = EngineConfig("m", compile_cache=str(tmp_path / "cache"), signing_key=given)
    with pytest.raises(InvalidConfig, match=limit):
        open_store(config)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    config = EngineConfig("m", compile_cache=str(tmp_path), signing_key=str(tmp_path / "none"))
    with pytest.raises(InvalidConfig, match="signing_key must be a readable file"):
        open_store(config)
