"""A compile cache in one tar file, to be carried to machines that share no folder.

Owns what goes into the archive and what comes out of one: entries and records under their names in
the folder, each checked on its way, nothing else. An archive is never extracted: its members are
read and handed to the store, so that no name in it can lead anywhere. Loads no JAX, unpickles
nothing.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from buckets.cache_entry import BadEntry
from buckets.cache_store import SUFFIX, CacheStore, Stored

_ENTRY = re.compile(rf"entries/([0-9a-f]{{64}}){re.escape(SUFFIX)}")
# Comes last and says what came before: without it the archive was cut off.
_CONTENTS = "contents.json"
SCHEMA_VERSION = 1
_RECORD = re.compile(r"records/([^/]+)/([^/]+)\.json")


class BadArchive(ValueError):
    """A file that is no archive of a compile cache, or a cut off one; says why."""


@dataclass(slots=True)
class Unpacked:
    """What became of an archive's members.

    Attributes:
        present: whole entries that the store had already.
        refused: name and reason of each member that was not taken.
    """

    entries: int = 0
    records: int = 0
    present: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def pack(
    store: CacheStore, target: BinaryIO, digests: Iterable[str] | None = None
) -> tuple[int, list[tuple[str, str]]]:
    """Writes the entries (all, or these) and every whole record.

    Returns how many entries went in, and digest and reason of each that did not. The same content
    gives the same bytes.
    """
    packed: list[str] = []
    bad: list[tuple[str, str]] = []
    wanted = sorted(store.digests() if digests is None else set(digests))
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for digest in wanted:
            try:
                data = store.export_entry(digest)
            except (OSError, BadEntry) as error:
                bad.append((digest, str(error)))
                continue
            _add(archive, f"entries/{digest}{SUFFIX}", data)
            packed.append(digest)
        for kind, name in store.records():
            text = store.export_record(kind, name)
            if text is not None:
                _add(archive, f"records/{kind}/{name}.json", text.encode())
        contents = {"schema_version": SCHEMA_VERSION, "entries": packed}
        _add(archive, _CONTENTS, json.dumps(contents).encode())
    return len(packed), bad


def unpack(source: Path, store: CacheStore) -> Unpacked:
    """Adds an archive's entries and records to the store; what is whole there already stays.

    Raises `BadArchive` where the file can't be read to its end, whose mark has the schema version
    too: what came before has been added, each checked by itself.
    """
    result = Unpacked()
    is_whole = False
    for name, data in _members(source):
        if name == _CONTENTS and data is not None:
            is_whole = True
            _check_version(source, data)
        elif data is None:
            result.refused.append((name, "no regular file"))
        elif match := _ENTRY.fullmatch(name):
            _take_entry(store, match[1], data, result)
        elif match := _RECORD.fullmatch(name):
            _take_record(store, match, data, result)
        else:
            result.refused.append((name, "not part of a compile cache"))
    if not is_whole:
        raise BadArchive(f"{source}: cut off, or not packed by tpu-engine ({_CONTENTS} is missing)")
    return result


def _members(source: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of each member; None for what is no regular file."""
    try:
        with tarfile.open(source, mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member) if _is_plain(member) else None
                data = None if file is None else file.read()
                if data is not None and len(data) != member.size:
                    raise BadArchive(f"{source}: cut off in {member.name}")
                yield member.name, data
    except tarfile.TarError as error:
        raise BadArchive(f"{source}: no archive of a compile cache: {error}") from error


def _is_plain(member: tarfile.TarInfo) -> bool:
    # A sparse file is small in the archive and may be huge in memory.
    return member.isreg() and not member.issparse()


def _check_version(source: Path, contents: bytes) -> None:
    try:
        version = json.loads(contents)["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadArchive(f"{source}: {_CONTENTS} can't be read") from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise BadArchive(f"{source}: packed by a newer release (schema {version!r})")


def _take_entry(store: CacheStore, digest: str, data: bytes, result: Unpacked) -> None:
    # Reading sets a damaged one aside and makes room.
    if isinstance(store.read(digest), Stored):
        result.present += 1
    elif reason := store.add_entry(digest, data):
        result.refused.append((f"entries/{digest}{SUFFIX}", reason))
    else:
        result.entries += 1


def _take_record(store: CacheStore, match: re.Match[str], data: bytes, result: Unpacked) -> None:
    kind, name = match.groups()
    try:
        reason = store.add_record(kind, name, data.decode())
    except UnicodeDecodeError:
        reason = "refused: no text"
    if reason:
        result.refused.append((match[0], reason))
    else:
        result.records += 1


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # owner, time and mode stay at their defaults
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
