"""What every test runs under: CPU devices, and where the shared test data lies.

Owns the process-wide settings of the test suite and the fixtures that more than one part uses.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports JAX: tests never look for an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root folder of the repository."""
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared test data (golden answers, traces); the test is skipped without it.

    `TPU_ENGINE_SHARED` names it; the default is `shared` beside the repository.
    """
    path = Path(os.environ.get("TPU_ENGINE_SHARED", REPO.parent / "shared"))
    if not (path / "assets").is_dir():
        pytest.skip(f"no shared test data at {path} (set TPU_ENGINE_SHARED)")
    return path
