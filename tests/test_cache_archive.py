"""A cache in a tar file: what comes out is what went in, and nothing else ever comes out."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from buckets.cache_archive import BadArchive, Unpacked, pack, unpack
from buckets.cache_key import CacheKey
from buckets.cache_store import CacheStore, Stored

SECRET = b"sixteen bytes or more"
KEY = CacheKey("p", "tokens=16 seqs=1", "cpu x 1", "tensor=1", "{}", "jax 0.10.2", "", "avx")
OTHER = CacheKey("q", "tokens=32 seqs=1", "cpu x 1", "tensor=1", "{}", "jax 0.10.2", "", "avx")
RECIPE = "ab" * 32


def filled(folder: Path, signing_key: bytes | None = None) -> CacheStore:
    store = CacheStore(folder, signing_key)
    for key, payload in ((KEY, b"one" * 900), (OTHER, b"two" * 900)):
        assert store.write(key, payload, {"compile_s": 1.0}) == ""
    assert store.put_record("recipe", RECIPE, {"program": "p"}) == ""
    return store


def packed(store: CacheStore, tmp_path: Path) -> Path:
    path = tmp_path / "cache.tar"
    with path.open("wb") as file:
        assert pack(store, file) == (2, [])
    return path


def tar_of(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    path = tmp_path / "made.tar"
    with tarfile.open(path, "w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        end = tarfile.TarInfo("contents.json")
        end.size = len(b'{"schema_version": 1}')
        archive.addfile(end, io.BytesIO(b'{"schema_version": 1}'))
    return path


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    source = filled(tmp_path / "a")
    archive = packed(source, tmp_path)
    target = CacheStore(tmp_path / "b")
    assert unpack(archive, target) == Unpacked(entries=2, records=1)
    assert target.entries() == source.entries()
    assert target.read(KEY.digest()) == source.read(KEY.digest())
    assert target.get_record("recipe", RECIPE) == {"program": "p"}
    assert unpack(archive, target) == Unpacked(present=2, records=1)


def test_the_same_cache_gives_the_same_bytes(tmp_path: Path) -> None:
    first = packed(filled(tmp_path / "a"), tmp_path).read_bytes()
    assert packed(filled(tmp_path / "b"), tmp_path).read_bytes() == first


def test_unpacking_merges_and_mends(tmp_path: Path) -> None:
    archive = packed(filled(tmp_path / "a"), tmp_path)
    target = filled(tmp_path / "b")
    (tmp_path / "b/entries" / f"{KEY.digest()}.executable").write_bytes(b"damaged")
    mine = CacheKey("r", "tokens=64 seqs=1", "cpu x 1", "tensor=1", "{}", "jax", "", "avx")
    target.write(mine, b"mine", {})
    assert unpack(archive, target) == Unpacked(entries=1, present=1, records=1)
    assert isinstance(target.read(KEY.digest()), Stored)
    assert isinstance(target.read(mine.digest()), Stored)


def test_a_damaged_entry_is_left_out_and_named(tmp_path: Path) -> None:
    store = filled(tmp_path / "a")
    (tmp_path / "a/entries" / f"{KEY.digest()}.executable").write_bytes(b"damaged")
    count, bad = pack(store, io.BytesIO())
    assert count == 1
    assert [digest for digest, _ in bad] == [KEY.digest()]


@pytest.mark.parametrize(
    "name",
    [
        "../escaped",
        "/tmp/escaped",
        "entries/../../escaped.executable",
        f"entries/{'0' * 63}.executable",
        f"./entries/{'0' * 64}.executable",
        "records/../up.json",
        "records/recipe/..json",
        "records/recipe/.hidden.json",
        "manifest.json",
        "set_aside/x",
        ".lock",
    ],
)
def test_no_name_leads_anywhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inner/cache"
    before = set(tmp_path.rglob("*"))
    result = unpack(tar_of(tmp_path, [(tarfile.TarInfo(name), b"x")]), CacheStore(folder))
    assert [refused for refused, _ in result.refused] == [name]
    new = set(tmp_path.rglob("*")) - before
    assert {path.name for path in new} == {"inner", "cache", "made.tar"}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_only_regular_files_are_taken(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo(f"entries/{KEY.digest()}.executable")
    member.type, member.linkname = kind, "/etc/passwd"
    result = unpack(tar_of(tmp_path, [(member, b"")]), CacheStore(tmp_path / "c"))
    assert [reason for _, reason in result.refused] == ["no regular file"]


def test_every_entry_is_checked_on_its_way_in(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    data = bytearray((tmp_path / "a/entries" / f"{KEY.digest()}.executable").read_bytes())
    data[-1] ^= 1
    name = f"entries/{KEY.digest()}.executable"
    store = CacheStore(tmp_path / "c")
    result = unpack(tar_of(tmp_path, [(tarfile.TarInfo(name), bytes(data))]), store)
    assert result.refused == [(name, "refused: checksum of the payload differs")]
    assert store.entries() == {}


def test_with_a_key_only_what_it_signed_comes_in(tmp_path: Path) -> None:
    archive = packed(filled(tmp_path / "a"), tmp_path)
    result = unpack(archive, CacheStore(tmp_path / "c", SECRET))
    assert (result.entries, result.records, len(result.refused)) == (0, 0, 3)
    archive = packed(filled(tmp_path / "b", SECRET), tmp_path)
    assert unpack(archive, CacheStore(tmp_path / "d", SECRET)).refused == []


def test_an_archive_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = packed(filled(tmp_path / "a"), tmp_path).read_bytes()
    cut = tmp_path / "cut.tar"
    end = whole.index(b"contents.json")
    for length in [0, 1, 511, *range(512, end + 512, 512), end + 512 + 5]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BadArchive):
            unpack(cut, CacheStore(tmp_path / "c"))
    assert all(reason == "" for _, reason in CacheStore(tmp_path / "c").check())


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello " * 500)
    with pytest.raises(BadArchive, match=r"notes\.txt"):
        unpack(other, CacheStore(tmp_path / "c"))


def test_an_archive_of_a_newer_release_is_named(tmp_path: Path) -> None:
    path = packed(filled(tmp_path / "a"), tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"schema_version": 1,', b'"schema_version": 2,'))
    with pytest.raises(BadArchive, match="newer release"):
        unpack(path, CacheStore(tmp_path / "c"))
