"""Where and under what load a benchmark ran: versions, commit, processor, noise.

Owns these facts only.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "grpcio", "tokenizers", "tpu-engine")
REPO = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Python and the packages of ours that the numbers depend on."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def commit() -> dict[str, object]:
    """The commit of the working tree, and whether files differ from it."""
    return {"commit": _git("rev-parse", "HEAD"), "is_dirty": bool(_git("status", "--porcelain"))}


def processor() -> dict[str, object]:
    """Model name, and the number of cores this process may use."""
    name = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return {"name": name, "cores": len(os.sched_getaffinity(0))}


def calibration_s() -> float:
    """Seconds a fixed piece of single-core arithmetic takes now: shows noise between runs."""
    begin = time.perf_counter()
    total = 0
    for number in range(3_000_000):
        total += number * number
    return time.perf_counter() - begin


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=REPO, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
