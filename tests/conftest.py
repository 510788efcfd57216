"""What every test runs under: CPU devices, and where the shared test data lies.

Owns the process-wide settings of the test suite and the fixtures that more than one part uses.
"""

from __future__ import annotations

import os
import sys
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


@pytest.fixture(autouse=True)
def fresh_interpreter() -> None:
    """Each test starts with an empty Pallas interpreter.

    A kernel that fails while it is interpreted leaves memories, clocks and settings behind, and the
    next kernel would be judged by those (`test_interpreter.py`).
    """
    interpreter = sys.modules.get("jax.experimental.pallas.tpu")
    if interpreter is not None:  # else nothing was interpreted yet; most tests need no JAX
        interpreter.reset_tpu_interpret_mode_state()
