"""Who may import whom, where a linter can't see it: what really gets loaded, and what names JAX."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOST_SIDE = (
    "buckets.cache_archive",
    "buckets.cache_store",
    "buckets.cache_upkeep",
    "buckets.executable_facts",
    "buckets.cost",
    "buckets.plan_file",
    "buckets.shape",
    "buckets.warm_order",
    "tpu_engine",
    "tpu_engine.config",
    "tpu_engine.derive",
    "tpu_engine.engine_loop",
    "tpu_engine.errors",
    "tpu_engine.front",
    "tpu_engine.front_engine",
    "tpu_engine.front_offline",
    "tpu_engine.kv_pages",
    "tpu_engine.live_plan",
    "tpu_engine.memory_plan",
    "tpu_engine.messages",
    "tpu_engine.misses",
    "tpu_engine.models.config",
    "tpu_engine.plans",
    "tpu_engine.request",
    "tpu_engine.scheduler",
    "tpu_engine.step_inputs",
    "tpu_engine.step_plan",
    "tpu_engine.step_thread",
    "tpu_engine.warm_progress",
    "tpu_engine.weights.open_model",
)
SERVER_SIDE = ("server.service", "server.streams", "server.validation", "server.client")
COMMAND_LINE = ("server.cli",)

# The only modules of `buckets` that may name JAX.
BUCKETS_WITH_JAX = {"compile_cache.py", "executable.py", "program_key.py", "warmup.py"}


def loaded_by(modules: tuple[str, ...], watched: tuple[str, ...]) -> set[str]:
    """Which of `watched` a fresh interpreter has loaded after importing `modules`."""
    code = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {watched!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by(("json",), ("json", "jax")) == {"json"}


def test_host_side_modules_load_no_jax_and_no_transport() -> None:
    assert loaded_by(HOST_SIDE, ("jax", "jaxlib", "flax", "grpc", "google.protobuf")) == set()


def test_server_modules_load_no_jax() -> None:
    assert loaded_by(SERVER_SIDE, ("jax", "jaxlib", "flax", "kernels")) == set()


def test_command_line_starts_light() -> None:
    assert loaded_by(COMMAND_LINE, ("jax", "jaxlib", "flax", "grpc", "tokenizers")) == set()


def imported_names(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_only_cache_and_warm_up_of_buckets_name_jax(repo_root: Path) -> None:
    with_jax = {
        path.name for path in (repo_root / "buckets").glob("*.py") if "jax" in imported_names(path)
    }
    assert with_jax <= BUCKETS_WITH_JAX


@pytest.mark.parametrize("package", ["tpu_engine"])
def test_package_root_is_empty(repo_root: Path, package: str) -> None:
    assert imported_names(repo_root / package / "__init__.py") == set()
