"""The file of one executable: a header that describes it, seals that prove it, the payload.

Owns the format, version 1:

    "tpu-engine executable 1\\n"    magic and schema version
    4 bytes                        length of the header, big-endian
    header                         JSON: key, facts, payload_bytes, payload_sha256
    32 bytes                       SHA-256 of everything before
    32 bytes                       HMAC-SHA256 of everything before the seals; zeros: unsigned
    payload                        pickled by JAX: code, never touched before all of this held

A reader refuses files of a newer version by name and leaves them where they are. Knows no folders.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from buckets.cache_key import CacheKey

SCHEMA_VERSION = 1
_MAGIC = b"tpu-engine executable "
_LENGTH_BYTES = 4
_SEAL_BYTES = 32
_UNSIGNED = bytes(_SEAL_BYTES)
# Far above any header; a damaged length must not make us read a whole file as one.
_MAX_HEADER_BYTES = 1 << 20
_MAX_MAGIC_BYTES = 40


class BadEntry(Exception):
    """A file that must not be loaded; says why.

    `is_damage` is false where somebody else can use it: another release, or who has its key.
    """

    def __init__(self, reason: str, *, is_damage: bool = True) -> None:
        super().__init__(reason)
        self.is_damage = is_damage


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, its first seal intact.

    Attributes:
        is_signed: carries a signature (which was not checked).
    """

    key: CacheKey
    facts: dict[str, Any]
    payload_bytes: int
    payload_sha256: str
    is_signed: bool


def pack_entry(
    key: CacheKey, payload: bytes, facts: Mapping[str, Any], signing_key: bytes | None
) -> bytes:
    """The file of an executable; signed where there is a key."""
    content = {
        "key": key.to_json(),
        "facts": dict(facts),
        "payload_bytes": len(payload),
        "payload_sha256": hashlib.sha256(payload).hexdigest(),
    }
    header = json.dumps(content, sort_keys=True).encode()
    start = _MAGIC + f"{SCHEMA_VERSION}\n".encode()
    body = start + len(header).to_bytes(_LENGTH_BYTES, "big") + header
    signature = _UNSIGNED if signing_key is None else sign(body, signing_key)
    return body + hashlib.sha256(body).digest() + signature + payload


def sign(content: bytes, signing_key: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104)."""
    return hmac.new(signing_key, content, hashlib.sha256).digest()


def header_limit() -> int:
    """Bytes from a file's start that always hold its whole header."""
    return _MAX_MAGIC_BYTES + _LENGTH_BYTES + _MAX_HEADER_BYTES + 2 * _SEAL_BYTES


def read_header(data: bytes) -> Header:
    """Reads the head of a file (its payload may be cut off); raises `BadEntry`."""
    return _parse(data)[0]


def unpack_entry(data: bytes, digest: str, signing_key: bytes | None) -> tuple[Header, bytes]:
    """The header and payload of a whole file that is called `digest`; raises `BadEntry`.

    With a signing key, an unsigned file or one signed with another key is refused.
    """
    header, body_end = _parse(data)
    seals_end = body_end + 2 * _SEAL_BYTES
    if signing_key is not None:
        if not header.is_signed:
            raise BadEntry("not signed, and a signing key is configured", is_damage=False)
        signature = data[body_end + _SEAL_BYTES : seals_end]
        if not hmac.compare_digest(signature, sign(data[:body_end], signing_key)):
            raise BadEntry("signed with another key", is_damage=False)
    if header.key.digest() != digest:
        raise BadEntry("holds the executable of another key")
    payload = data[seals_end:]
    if len(payload) != header.payload_bytes:
        raise BadEntry(f"holds {len(payload)} bytes of {header.payload_bytes}")
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        raise BadEntry("checksum of the payload differs")
    return header, payload


def _parse(data: bytes) -> tuple[Header, int]:
    """The header and where it ends."""
    start, newline, _ = data[:_MAX_MAGIC_BYTES].partition(b"\n")
    version = start.removeprefix(_MAGIC)
    if not newline or not start.startswith(_MAGIC) or not version.isdigit():
        raise BadEntry("no file of a compile cache")
    if int(version) > SCHEMA_VERSION:
        raise BadEntry(f"written by a newer release (schema {int(version)})", is_damage=False)
    length_end = len(start) + 1 + _LENGTH_BYTES
    length = int.from_bytes(data[len(start) + 1 : length_end], "big")
    body_end = length_end + length
    if length > _MAX_HEADER_BYTES or len(data) < body_end + 2 * _SEAL_BYTES:
        raise BadEntry("header is cut off")
    seal = data[body_end : body_end + _SEAL_BYTES]
    if hashlib.sha256(data[:body_end]).digest() != seal:
        raise BadEntry("checksum of the header differs")
    signature = data[body_end + _SEAL_BYTES : body_end + 2 * _SEAL_BYTES]
    return _header(data[length_end:body_end], signature != _UNSIGNED), body_end


def _header(text: bytes, is_signed: bool) -> Header:
    try:
        content = cast("dict[str, Any]", json.loads(text))
        return Header(
            key=CacheKey.from_json(content["key"]),
            facts=dict(content["facts"]),
            payload_bytes=int(content["payload_bytes"]),
            payload_sha256=str(content["payload_sha256"]),
            is_signed=is_signed,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadEntry(f"header can't be read: {error}") from error
