"""`tpu-engine demo`: its whole way on a tiny model, and the server's own error when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_model


def run_demo(*words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "server.cli", "demo", *words)
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_server_that_can_not_start_is_quoted(tmp_path: Path) -> None:
    done = run_demo("--model", "nowhere", "--compile-cache", str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the server ended: error: model 'nowhere' is neither")


@pytest.mark.long
def test_the_second_run_compiles_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model.write_hf(model)
    words = ("--model", str(model), "--max-tokens", "8", "--compile-cache", str(tmp_path / "cache"))
    first, second = run_demo(*words), run_demo(*words)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        assert "What is gravity?" in done.stdout
        assert "exit code 0" in done.stdout
    assert "\n0 compiled" in second.stdout
    assert "\n0 compiled" not in first.stdout
