"""The version of the installed package, as clients and operators see it."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The installed version, or "unknown" in a source tree that was never installed."""
    try:
        return metadata.version("tpu-engine")
    except metadata.PackageNotFoundError:
        return "unknown"
