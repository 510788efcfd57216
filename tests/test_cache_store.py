"""The folder of a compile cache under damage, crowds, full disks and other releases."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from buckets.cache_entry import BadEntry, pack_entry, read_header, unpack_entry
from buckets.cache_key import CacheKey
from buckets.cache_manifest import BadManifest, manifest_from_text, manifest_to_text, unsealed
from buckets.cache_store import CacheStore, Rejected, Stored

SECRET = b"sixteen bytes or more"
PAYLOAD = b"payload " * 40


def key(program: str = "p") -> CacheKey:
    return CacheKey(
        program=program,
        shape="tokens=16 seqs=1 pages=4 logits=1 full",
        devices="TPU v6 lite x 8, 2x4x1",
        mesh="tensor=8",
        compiler_options="{}",
        versions="jax 0.10.2",
        flags="",
        host="",
    )


DIGEST = key().digest()


def entry_path(directory: Path, digest: str = DIGEST) -> Path:
    return directory / "entries" / f"{digest}.executable"


def filled(directory: Path, signing_key: bytes | None = None) -> CacheStore:
    store = CacheStore(directory, signing_key)
    assert store.write(key(), PAYLOAD, {"compile_s": 2.5}) == ""
    return store


def test_what_is_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path)
    found = CacheStore(tmp_path).read(DIGEST)
    assert found == Stored(key(), PAYLOAD, {"compile_s": 2.5})
    assert CacheStore(tmp_path).read(key("other").digest()) is None


def test_a_truncated_entry_is_never_read(tmp_path: Path) -> None:
    filled(tmp_path)
    whole = entry_path(tmp_path).read_bytes()
    for length in range(len(whole)):
        with pytest.raises(BadEntry):
            unpack_entry(whole[:length], DIGEST, None)


def test_an_entry_with_any_byte_changed_is_never_read() -> None:
    whole = pack_entry(key(), PAYLOAD, {}, SECRET)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        with pytest.raises(BadEntry):
            unpack_entry(bytes(changed), DIGEST, SECRET)


def test_a_refused_entry_is_set_aside_and_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    entry_path(tmp_path).write_bytes(b"something else")
    found = store.read(DIGEST)
    assert isinstance(found, Rejected)
    assert DIGEST[:12] in found.reason
    assert "no file of a compile cache" in found.reason
    assert store.read(DIGEST) is None
    assert len(list((tmp_path / "set_aside").iterdir())) == 1


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    other = key("other").digest()
    entry_path(tmp_path).rename(entry_path(tmp_path, other))
    found = store.read(other)
    assert isinstance(found, Rejected)
    assert "another key" in found.reason


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadEntry):
        unpack_entry(data, DIGEST, None)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_head_with_any_splice_is_refused_or_unchanged(noise: bytes, place: int) -> None:
    whole = pack_entry(key(), PAYLOAD, {}, None)
    spliced = whole[:place] + noise + whole[place + len(noise) :]
    if spliced != whole:
        with pytest.raises(BadEntry):
            unpack_entry(spliced, DIGEST, None)


# --- signatures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written_with", "reason"), [(None, "not signed"), (b"some other secret", "another key")]
)
def test_only_what_we_signed_is_read_with_a_key(
    tmp_path: Path, written_with: bytes | None, reason: str
) -> None:
    filled(tmp_path, written_with)
    found = CacheStore(tmp_path, SECRET).read(DIGEST)
    assert isinstance(found, Rejected)
    assert reason in found.reason
    # Whoever has the other key can still use it: a wrong key must not empty a shared folder.
    assert isinstance(CacheStore(tmp_path, written_with).read(DIGEST), Stored)


def test_signed_entries_are_read_with_their_key_and_without_one(tmp_path: Path) -> None:
    filled(tmp_path, SECRET)
    assert isinstance(CacheStore(tmp_path, SECRET).read(DIGEST), Stored)
    assert isinstance(CacheStore(tmp_path).read(DIGEST), Stored)


def test_records_are_signed_too(tmp_path: Path) -> None:
    CacheStore(tmp_path).put_record("recipe", DIGEST, {"program": "forged"})
    signing = CacheStore(tmp_path, SECRET)
    assert signing.get_record("recipe", DIGEST) is None
    signing.put_record("recipe", DIGEST, {"program": "ours"})
    assert signing.get_record("recipe", DIGEST) == {"program": "ours"}
    # A record can't be passed off as another one.
    (tmp_path / "records/recipe" / f"{DIGEST}.json").rename(tmp_path / "records/recipe/other.json")
    assert signing.get_record("recipe", "other") is None


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.put_record("recipe", DIGEST, {"program": "p"})
    path = tmp_path / "records/recipe" / f"{DIGEST}.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert store.get_record("recipe", DIGEST) is None


# --- the manifest ----------------------------------------------------------------------------


def test_a_manifest_with_any_byte_changed_is_made_anew(tmp_path: Path) -> None:
    store = filled(tmp_path)
    listed = store.entries()
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises((BadManifest, UnicodeDecodeError)):
            manifest_from_text(path.read_text())
        if place % 50 == 0:
            assert store.entries() == listed
    assert store.write(key("other"), PAYLOAD, {}) == ""
    assert manifest_from_text(path.read_text()).keys() == {DIGEST, key("other").digest()}


def test_a_missing_or_lagging_manifest_hides_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path)
    behind = (tmp_path / "manifest.json").read_bytes()
    store.write(key("other"), PAYLOAD, {})
    both = {DIGEST, key("other").digest()}
    for content in (None, behind):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "manifest.json").write_bytes(content)
        assert store.entries().keys() == both
    entry_path(tmp_path).unlink()
    assert store.entries().keys() == {key("other").digest()}


def test_foreign_files_do_no_harm(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for name in ("entries/README", "entries/x.executable", "notes.txt", "entries/.writing-abc-1"):
        (tmp_path / name).write_text("hello")
    entry_path(tmp_path, "0" * 64).write_text("an entry by name only")
    assert store.entries().keys() == {DIGEST}
    assert dict(store.check()) == {DIGEST: "", "0" * 64: "no file of a compile cache"}


# --- other releases --------------------------------------------------------------------------


def test_files_of_the_first_release_are_read(repo_root: Path, tmp_path: Path) -> None:
    first = repo_root / "tests/fixtures/compile_cache_1"
    digest = next((first / "entries").iterdir()).stem
    header, payload = unpack_entry(entry_path(first, digest).read_bytes(), digest, SECRET)
    assert payload == PAYLOAD
    assert header.facts == {"compile_s": 2.5}
    assert manifest_from_text((first / "manifest.json").read_text()).keys() == {digest}
    record = (first / "records/recipe" / f"{digest}.json").read_text()
    assert unsealed(record)["content"] == {"program": "p"}


def test_an_entry_of_a_newer_release_is_named_and_left_where_it_is(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path = entry_path(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"executable 1\n", b"executable 2\n", 1))
    found = store.read(DIGEST)
    assert isinstance(found, Rejected)
    assert "newer release (schema 2)" in found.reason
    assert path.exists()


def test_a_manifest_of_another_version_is_made_anew(tmp_path: Path) -> None:
    store = filled(tmp_path)
    text = manifest_to_text(store.entries())
    with pytest.raises(BadManifest):
        manifest_from_text(text.replace('"schema_version": 1', '"schema_version": 2'))


# --- crowds and crashes ----------------------------------------------------------------------


# A process that has loaded JAX must not fork; this server of processes has not.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.test_cache_store"])


def write_many(directory: Path, seed: int) -> None:
    store = CacheStore(directory)
    (directory / f"started-{seed}").touch()
    choice = random.Random(seed)
    while True:
        program = str(choice.randrange(8))
        store.write(key(program), program.encode() * choice.randrange(1, 200_000), {})


def wait_for(*paths: Path) -> None:
    given_up_s = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < given_up_s
        time.sleep(0.01)


def test_writers_killed_at_any_moment_leave_whole_entries(tmp_path: Path) -> None:
    reader = CacheStore(tmp_path)
    for seed in range(6):
        writers = [
            PROCESSES.Process(target=write_many, args=(tmp_path, seed + i)) for i in (0, 100)
        ]
        for writer in writers:
            writer.start()
        wait_for(tmp_path / f"started-{seed}", tmp_path / f"started-{seed + 100}")
        time.sleep(0.02 + 0.03 * seed)
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        assert all(reason == "" for _, reason in reader.check())
    assert reader.entries()
    assert not (tmp_path / "set_aside").exists()
    for program in range(8):
        assert not isinstance(reader.read(key(str(program)).digest()), Rejected)
    before = {path for path in tmp_path.rglob("*") if path.name.startswith(".writing-")}
    reader.remove_leftovers(before_s=time.time() + 1)
    assert not [path for path in before if path.exists()]
    assert reader.write(key("after"), PAYLOAD, {}) == ""


def write_five(directory: Path, writer: int) -> None:
    store = CacheStore(directory)
    for i in range(5):
        assert store.write(key(f"{writer}/{i}"), PAYLOAD, {}) == ""


def test_many_writers_lose_no_entry_of_the_manifest(tmp_path: Path) -> None:
    writers = [PROCESSES.Process(target=write_five, args=(tmp_path, i)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(manifest_from_text((tmp_path / "manifest.json").read_text())) == 20


def write_to_a_full_disk(directory: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    note = CacheStore(directory).write(key("large"), b"x" * 100_000, {})
    assert note.startswith("not stored:"), note


def test_a_full_disk_costs_the_entry_and_nothing_else(tmp_path: Path) -> None:
    store = filled(tmp_path)
    writer = PROCESSES.Process(target=write_to_a_full_disk, args=(tmp_path,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert store.read(key("large").digest()) is None
    assert not list(tmp_path.rglob(".writing-*"))
    assert isinstance(store.read(DIGEST), Stored)


def test_a_read_only_folder_is_read_and_says_what_it_can_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    store.write(key("damaged"), PAYLOAD, {})
    damaged = key("damaged").digest()
    entry_path(tmp_path, damaged).write_bytes(b"")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    # Permissions stop no test that runs as root.
    for name in ("replace", "unlink", "mkdir"):
        monkeypatch.setattr(type(store.directory), name, refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert isinstance(store.read(DIGEST), Stored)
    found = store.read(damaged)
    assert isinstance(found, Rejected)
    assert "can't be set aside: Read-only file system" in found.reason
    assert store.write(key("new"), PAYLOAD, {}) == "not stored: Read-only file system"
    assert store.put_record("recipe", DIGEST, {}) == "not stored: Read-only file system"
    assert "not removed: Read-only" in store.remove({DIGEST})


def test_removed_entries_are_gone_from_the_manifest(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.write(key("other"), PAYLOAD, {})
    assert store.last_use_s(DIGEST) > 0
    assert store.remove({DIGEST, "f" * 64}) == ""
    assert store.last_use_s(DIGEST) == 0
    assert store.read(DIGEST) is None
    assert manifest_from_text((tmp_path / "manifest.json").read_text()).keys() == {
        key("other").digest()
    }


def test_a_bucket_works_like_a_folder() -> None:
    fsspec.register_implementation("s3", MemoryFileSystem, clobber=True)
    store = CacheStore("s3://bucket/compile-cache")
    assert store.write(key(), PAYLOAD, {}) == ""
    assert isinstance(store.read(DIGEST), Stored)
    assert store.entries().keys() == {DIGEST}
    assert store.put_record("recipe", DIGEST, {"program": "p"}) == ""
    assert store.get_record("recipe", DIGEST) == {"program": "p"}
    assert store.read(key("other").digest()) is None


def test_a_header_is_read_from_the_start_of_a_file() -> None:
    whole = pack_entry(key(), PAYLOAD, {"compile_s": 1.0}, None)
    header = read_header(whole[: -len(PAYLOAD)])
    assert (header.key, header.payload_bytes) == (key(), len(PAYLOAD))
