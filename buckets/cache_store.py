"""The folder of a compile cache: reads and writes entries and small records, lists and removes.

Owns where things lie, and how many processes share them: every file is written under a temporary
name and renamed, a reader checks what it reads, the manifest is changed under a lock. Nothing the
file system refuses is fatal: a line says what happened. Loads no JAX and unpickles nothing.

    manifest.json                    index; can be made anew from the entries
    entries/<digest>.executable      see `buckets.cache_entry`
    records/<kind>/<digest>.json     what the engine notes down (recipes, canaries)
    claims/                          locks of those who build something
    set_aside/                       files that were refused, for whoever wants to look
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from etils import epath

from buckets.cache_entry import (
    BadEntry,
    header_limit,
    pack_entry,
    read_header,
    sign,
    unpack_entry,
)
from buckets.cache_key import CacheKey
from buckets.cache_manifest import (
    EntryInfo,
    manifest_from_text,
    manifest_to_text,
    sealed,
    unsealed,
)

SUFFIX = ".executable"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = ".writing-"
_RECORD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Entries = dict[str, EntryInfo]


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole entry; `payload` is code."""

    key: CacheKey
    payload: bytes
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rejected:
    """An entry that must not be loaded; `reason` is a readable line, also of what became of it."""

    digest: str
    reason: str


class CacheStore:
    """A compile cache in `directory`: a folder, or any address etils.epath can open.

    With a `signing_key` everything written is signed and nothing unsigned is read. Raises
    `OSError` where the folder neither exists nor can be made.
    """

    def __init__(self, directory: epath.PathLike, signing_key: bytes | None = None) -> None:
        self.directory = epath.Path(directory)
        self._signing_key = signing_key
        # A lock and a last use are things of local file systems.
        self._is_local = "://" not in os.fspath(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def read(self, digest: str) -> Stored | Rejected | None:
        """The entry called `digest`; None where there is none. Damaged ones are set aside."""
        path = self._entry_path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return Rejected(digest, f"{digest[:12]}: can't be read: {_why(error)}")
        try:
            header, payload = unpack_entry(data, digest, self._signing_key)
        except BadEntry as error:
            if not error.is_damage:  # others may well be able to use it
                return Rejected(digest, f"{digest[:12]}: {error}; left where it is")
            return Rejected(digest, self.set_aside(digest, str(error)))
        if self._is_local:
            with contextlib.suppress(OSError):
                os.utime(path)  # the last use, for `remove`'s callers
        return Stored(header.key, payload, header.facts)

    def write(self, key: CacheKey, payload: bytes, facts: Mapping[str, Any]) -> str:
        """Stores an executable; returns "" or why it could not."""
        digest = key.digest()
        data = pack_entry(key, payload, facts, self._signing_key)
        info = EntryInfo.of(read_header(data))
        return self._keep(digest, data, info)

    def add_entry(self, digest: str, data: bytes) -> str:
        """Stores an entry's file that was made elsewhere, checked; returns "" or why it was not."""
        try:
            header, _ = unpack_entry(data, digest, self._signing_key)
        except BadEntry as error:
            return f"refused: {error}"
        return self._keep(digest, data, EntryInfo.of(header))

    def set_aside(self, digest: str, reason: str) -> str:
        """Moves an entry out of the way; returns one line that says why and what became of it."""
        path = self._entry_path(digest)
        folder = self.directory / "set_aside"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.replace(folder / f"{digest}-{secrets.token_hex(4)}{SUFFIX}")
        except FileNotFoundError:
            pass  # somebody else did it
        except OSError as error:
            return f"{digest[:12]}: {reason}; can't be set aside: {_why(error)}"
        return f"{digest[:12]}: {reason}; set aside"

    def get_record(self, kind: str, name: str) -> dict[str, Any] | None:
        """What `put_record` stored; None where it is missing, damaged or not properly signed."""
        text = self.export_record(kind, name)
        return None if text is None else unsealed(text)["content"]

    def put_record(self, kind: str, name: str, content: Mapping[str, Any]) -> str:
        """Stores a small JSON object under `kind` and a digest; returns "" or why it could not."""
        signature = self._record_signature(kind, name, content)
        return self._keep_record(
            kind, name, sealed({"content": dict(content), "signature": signature})
        )

    def add_record(self, kind: str, name: str, text: str) -> str:
        """Stores a record's file that was made elsewhere, checked; returns "" or why it was not."""
        if not is_record_name(kind, name):
            return "refused: no name of a record"
        if self._checked_record(kind, name, text) is None:
            return "refused: damaged, or not signed with our key"
        return self._keep_record(kind, name, text)

    def records(self) -> tuple[tuple[str, str], ...]:
        """Kind and name of every record, whole or not."""
        try:
            paths = list(self.directory.glob("records/*/*.json"))
        except OSError:
            return ()
        names = ((path.parent.name, path.name.removesuffix(".json")) for path in paths)
        return tuple(sorted(pair for pair in names if is_record_name(*pair)))

    @contextlib.contextmanager
    def claim(self, name: str, *, patient: bool) -> Iterator[bool]:
        """Holds the right to build `name`, until the block or the process ends.

        Gives False where another process holds it, unless `patient`: then it waits. Where nothing
        can be locked (remote folders, read-only ones) everybody gets True.
        """
        try:
            if not self._is_local:
                raise OSError("no locks")
            (self.directory / "claims").mkdir(exist_ok=True)
            path = self.directory / "claims" / name
            lock = open(path, "wb")  # noqa: SIM115 - closed below
        except OSError:
            yield True
            return
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
            except OSError:
                yield False
                return
            try:
                yield True
            finally:
                # Whoever waits for this very file gets it and looks into the store first.
                path.unlink(missing_ok=True)

    def entries(self) -> Entries:
        """Everything stored, by digest. Files nobody can read are left out: see `check`."""
        listed = self._listed()
        known = {digest: info for digest, info in self._manifest().items() if digest in listed}
        return known | self._scan(listed - known.keys())

    def digests(self) -> frozenset[str]:
        """Names of all entries, whole or not."""
        return frozenset(self._listed())

    def export_entry(self, digest: str) -> bytes:
        """The file of an entry, checked; raises `BadEntry` or `OSError`."""
        data = self._entry_path(digest).read_bytes()
        unpack_entry(data, digest, self._signing_key)
        return data

    def export_record(self, kind: str, name: str) -> str | None:
        """The file of a record; None where it isn't whole."""
        try:
            text = self._record_path(kind, name).read_text()
        except (OSError, ValueError):
            return None
        return None if self._checked_record(kind, name, text) is None else text

    def refresh(self) -> tuple[bool, str]:
        """Makes the manifest anew from the entries where it says anything else.

        Returns whether it did, and "" or why it could not be done.
        """
        if self._manifest() == self._scan(self._listed()):
            return False, ""
        return True, self._change_manifest(lambda _: self._scan(self._listed()))

    def check(self) -> Iterator[tuple[str, str]]:
        """Reads every entry whole; yields its digest and "" or what is wrong. Moves nothing."""
        for digest in sorted(self._listed()):
            try:
                self.export_entry(digest)
            except (OSError, BadEntry) as error:
                yield digest, str(error)
            else:
                yield digest, ""

    def last_use_s(self, digest: str) -> float:
        """When an entry was last read or written, as a Unix time; 0 if it is gone."""
        try:
            return float(self._entry_path(digest).stat().mtime or 0)
        except OSError:
            return 0.0

    def remove(self, digests: set[str]) -> str:
        """Deletes entries; returns "" or why one could not be."""
        try:
            for digest in digests:
                self._entry_path(digest).unlink(missing_ok=True)
        except OSError as error:
            return f"not removed: {_why(error)}"

        def kept(entries: Entries) -> Entries:
            return {digest: info for digest, info in entries.items() if digest not in digests}

        return self._change_manifest(kept)

    def remove_records(self, names: Iterable[tuple[str, str]]) -> str:
        """Deletes records, by kind and name; returns "" or why one could not be."""
        try:
            for kind, name in names:
                self._record_path(kind, name).unlink(missing_ok=True)
        except OSError as error:
            return f"not removed: {_why(error)}"
        return ""

    def remove_leftovers(self, before_s: float) -> int:
        """Deletes temporary files of killed writers last touched before this Unix time."""
        patterns = (f"{folder}{_TEMPORARY}*" for folder in ("", "entries/", "records/*/"))
        return sum(self._remove_old(pattern, before_s) for pattern in patterns)

    def remove_set_aside(self, before_s: float) -> int:
        """Deletes refused files that were set aside before this Unix time."""
        return self._remove_old(f"set_aside/*{SUFFIX}", before_s)

    def _remove_old(self, pattern: str, before_s: float) -> int:
        count = 0
        with contextlib.suppress(OSError):
            for path in self.directory.glob(pattern):
                with contextlib.suppress(OSError):
                    if float(path.stat().mtime or 0) < before_s:
                        path.unlink(missing_ok=True)
                        count += 1
        return count

    def _keep(self, digest: str, data: bytes, info: EntryInfo) -> str:
        try:
            self._put(self._entry_path(digest), data)
        except OSError as error:
            return f"not stored: {_why(error)}"
        return self._change_manifest(lambda entries: entries | {digest: info})

    def _keep_record(self, kind: str, name: str, text: str) -> str:
        try:
            self._put(self._record_path(kind, name), text.encode())
        except OSError as error:
            return f"not stored: {_why(error)}"
        return ""

    def _checked_record(self, kind: str, name: str, text: str) -> dict[str, Any] | None:
        try:
            content = unsealed(text)
            body = content["content"]
        except (ValueError, KeyError):
            return None
        if not isinstance(body, dict):
            return None
        body = cast("dict[str, Any]", body)
        expected = self._record_signature(kind, name, body)
        return body if expected is None or content.get("signature") == expected else None

    def _entry_path(self, digest: str) -> epath.Path:
        return self.directory / "entries" / f"{digest}{SUFFIX}"

    def _record_path(self, kind: str, name: str) -> epath.Path:
        return self.directory / "records" / kind / f"{name}.json"

    def _record_signature(self, kind: str, name: str, content: Mapping[str, Any]) -> str | None:
        if self._signing_key is None:
            return None
        text = sealed({"kind": kind, "name": name, "content": dict(content)})
        return sign(text.encode(), self._signing_key).hex()

    def _listed(self) -> set[str]:
        try:
            names = [path.name for path in (self.directory / "entries").iterdir()]
        except OSError:
            return set()
        stems = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return {stem for stem in stems if _DIGEST.fullmatch(stem)}

    def _manifest(self) -> Entries:
        try:
            return manifest_from_text((self.directory / "manifest.json").read_text())
        except (OSError, ValueError):
            return {}

    def _scan(self, digests: set[str]) -> Entries:
        """Reads the head of every entry."""
        found: Entries = {}
        for digest in digests:
            with contextlib.suppress(OSError, BadEntry):
                with self._entry_path(digest).open("rb") as file:
                    header = read_header(file.read(header_limit()))
                if header.key.digest() == digest:
                    found[digest] = EntryInfo.of(header)
        return found

    def _change_manifest(self, change: Callable[[Entries], Entries]) -> str:
        """Brings the manifest up to date with `change`; one process at a time where we can lock."""
        try:
            with self._locked():
                entries = change(self.entries())
                self._put(self.directory / "manifest.json", manifest_to_text(entries).encode())
        except OSError as error:
            return f"manifest not written: {_why(error)}"
        return ""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._is_local:
            yield
            return
        with open(self.directory / ".lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _put(self, path: epath.Path, data: bytes) -> None:
        """Writes under a temporary name, then renames: readers see a whole file or none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{path.name[:16]}-{secrets.token_hex(4)}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def is_record_name(kind: str, name: str) -> bool:
    """Whether a record may be called so: nothing that leads out of its folder."""
    return all(_RECORD_NAME.fullmatch(part) for part in (kind, name))


def _why(error: OSError) -> str:
    return error.strerror or str(error)
