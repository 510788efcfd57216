"""Opening the store of compiled programs that a configuration names.

Owns the checks of that folder and of the signing key. What is stored is `buckets`' part.
"""

from __future__ import annotations

from pathlib import Path

from buckets.cache_store import CacheStore
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig

MIN_KEY_BYTES = 16


def open_store(config: EngineConfig) -> CacheStore | None:
    """The store of a derived configuration; None where nothing is kept.

    Raises `InvalidConfig` where the folder can't be had or the key can't be used.
    """
    # An interpreted kernel calls back into this process: its program can't be kept.
    if not config.compile_cache or config.attention == "pallas-interpret":
        if config.require_warm:
            raise InvalidConfig("require_warm", "off where no program is kept", True)
        return None
    key = None if config.signing_key is None else read_signing_key(config.signing_key)
    given = config.compile_cache
    directory = given if "://" in given else Path(given).expanduser()
    try:
        return CacheStore(directory, key)
    except OSError as error:
        given = f"{directory} ({error.strerror or error})"
        raise InvalidConfig("compile_cache", "a folder, there or to be made", given) from error
    except (KeyError, ImportError) as error:  # no such scheme, or its file system isn't installed
        limit = "a folder, or an address whose file system is installed (gs:// needs gcsfs)"
        raise InvalidConfig("compile_cache", limit, f"{given} ({error})") from error


def read_signing_key(path: str) -> bytes:
    """The secret in a file; raises `InvalidConfig` where it is missing, short or open to all."""
    file = Path(path).expanduser()
    try:
        content, mode = file.read_bytes().strip(), file.stat().st_mode
    except OSError as error:
        given = f"{path} ({error.strerror})"
        raise InvalidConfig("signing_key", "a readable file", given) from error
    if len(content) < MIN_KEY_BYTES:
        limit = f"a file with at least {MIN_KEY_BYTES} bytes of secret"
        raise InvalidConfig("signing_key", limit, f"{path} ({len(content)} bytes)")
    if mode & 0o007:
        raise InvalidConfig("signing_key", "a file that not everybody may read (chmod o=)", path)
    return content
