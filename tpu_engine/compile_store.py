"""Opening the store of compiled programs that a configuration names.

Owns the checks of that folder and of the signing key. What is stored is `buckets`' part.
"""

from __future__ import annotations

from pathlib import Path

from etils import epath

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
    return open_folder(config.compile_cache, config.signing_key)


def open_folder(
    given: str, signing_key: str | None, option: str = "compile_cache", *, make: bool = True
) -> CacheStore:
    """The store in a folder or at an address; `option` is what errors call it.

    Raises `InvalidConfig` like `open_store`, and, unless it may `make` the folder, where it isn't.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    place = given if "://" in given else str(Path(given).expanduser())
    try:
        directory = epath.Path(place)
        if not make and not directory.is_dir():
            raise InvalidConfig(option, "a folder that is there", given)
        return CacheStore(directory, key)
    except OSError as error:
        reason = f"{place} ({error.strerror or error})"
        raise InvalidConfig(option, "a folder, there or to be made", reason) from error
    except (KeyError, ImportError) as error:  # no such scheme, or its file system isn't installed
        limit = "a folder, or an address whose file system is installed (gs:// needs gcsfs)"
        raise InvalidConfig(option, limit, f"{given} ({error})") from error


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
