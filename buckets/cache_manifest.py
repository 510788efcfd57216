"""The index of a compile cache: what each entry is, without opening it.

Owns the manifest's format and its seal. The entries are the truth: a manifest that is missing,
damaged, of another version or behind them is made anew. Knows no folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from buckets.cache_entry import Header
from buckets.cache_key import CacheKey

SCHEMA_VERSION = 1


class BadManifest(ValueError):
    """A manifest that can't be used; says why."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One stored executable, as listed.

    Attributes:
        num_bytes: of its payload.
        sha256: of its payload.
    """

    key: CacheKey
    facts: dict[str, Any]
    num_bytes: int
    sha256: str
    is_signed: bool

    @classmethod
    def of(cls, header: Header) -> EntryInfo:
        return cls(
            header.key,
            header.facts,
            header.payload_bytes,
            header.payload_sha256,
            header.is_signed,
        )


def manifest_to_text(entries: Mapping[str, EntryInfo]) -> str:
    """The file: `entries` by digest."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "entries": {
            digest: {
                "key": info.key.to_json(),
                "facts": info.facts,
                "num_bytes": info.num_bytes,
                "sha256": info.sha256,
                "is_signed": info.is_signed,
            }
            for digest, info in sorted(entries.items())
        },
    }
    return sealed(content)


def manifest_from_text(text: str) -> dict[str, EntryInfo]:
    """Reads `manifest_to_text`'s form; raises `BadManifest`."""
    try:
        content = unsealed(text)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise BadManifest(f"schema_version {content.get('schema_version')!r}")
        return {
            digest: EntryInfo(
                key=CacheKey.from_json(entry["key"]),
                facts=dict(entry["facts"]),
                num_bytes=int(entry["num_bytes"]),
                sha256=str(entry["sha256"]),
                is_signed=bool(entry["is_signed"]),
            )
            for digest, entry in content["entries"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"can't be read: {error}") from error


def sealed(content: Mapping[str, Any]) -> str:
    """JSON text of `content` with its own checksum, one line each."""
    text = json.dumps(content, sort_keys=True)
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed(text: str) -> dict[str, Any]:
    """Reads `sealed`'s form; raises `BadManifest` where a byte differs."""
    body, _, rest = text.partition("\n")
    if rest != f"{hashlib.sha256(body.encode()).hexdigest()}\n":
        raise BadManifest("checksum differs")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise BadManifest(f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadManifest("is no JSON object")
    return cast("dict[str, Any]", content)
