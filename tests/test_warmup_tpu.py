"""Warm-up for TPUs that aren't here, by the real compiler (`make test-tpu`).

The whole matrix of models and topologies is `make warmup-matrix`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buckets.plan import Plan
from buckets.plan_file import plan_to_yaml
from buckets.shape import StepShape
from kernels.chips import CHIPS

SHORT = [("v5e:2x2", "smollm2-135m"), ("v6e:2x4", "smollm2-135m")]
SHORT += [("v5e:2x2", "llama-3.1-8b"), ("v6e:2x4", "llama-3.1-8b")]
TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v6e:2x4", "tpu7x:2x2x1"]
MATRIX = [(name, model) for model in ("smollm2-135m", "llama-3.1-8b") for name in TOPOLOGIES]
DEVICES = {("v6e:2x4", "llama-3.1-8b"): 8, ("tpu7x:2x2x1", "llama-3.1-8b"): 8}
# Pages of 32 positions, 1024 of them per request.
OPTIONS = ("--max-num-seqs=8", "--max-num-batched-tokens=64", "--max-model-len=1024")
SHAPES = [StepShape(8, 8, 32, 8), StepShape(64, 8, 32, 8)]


def run(repo_root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", *map(str, arguments), *OPTIONS, "--page-size=32"]
    environment = {k: v for k, v in os.environ.items() if k != "LIBTPU_INIT_ARGS"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=repo_root, env=environment, check=False
    )


def warmed(repo_root: Path, tmp_path: Path, topology: str, model: str, shapes: list[StepShape]):
    plan, report = tmp_path / "plan.yaml", tmp_path / "report.json"
    plan.write_text(plan_to_yaml(Plan.of(shapes)))
    given = (
        repo_root / "tests/fixtures/model_configs" / model,
        f"--topology={topology}",
        f"--plan={plan}",
        f"--compile-cache={tmp_path / 'cache'}",
    )
    done = run(repo_root, "warmup", *given, f"--json={report}", "--jobs=1")
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(report.read_text())
    assert (content["built"], content["failures"]) == (len(shapes), [])
    return content, given


def check(repo_root: Path, content: dict[str, Any], given: tuple[Any, ...]) -> None:
    topology, model = given[1].partition("=")[2], given[0].name
    num_devices = DEVICES.get((topology, model), 1 if model.startswith("smollm2") else 4)
    assert content["mesh"] == {"tensor": num_devices}
    for row in content["shapes"]:
        assert row["hbm_bytes"] <= CHIPS[topology.partition(":")[0]].hbm_bytes
        assert row["code_bytes"] > 0
        assert row["roofline_step_s"] > 0
        assert bool(row["collectives"]) == (num_devices > 1)
    planned = memory(repo_root, given)
    assert all(shape["is_compiled"] for shape in planned["shapes"])
    # The plan's weights and pages are the compiler's arguments, its temporaries the compiler's.
    arguments = planned["weight_bytes"] + planned["kv_bytes"]
    most = max(row["argument_bytes"] + row["temp_bytes"] for row in content["shapes"])
    assert arguments + planned["temp_bytes"] == pytest.approx(most, rel=0.02)


def memory(repo_root: Path, given: tuple[Any, ...]) -> dict[str, Any]:
    done = run(repo_root, "plan", "memory", *given, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.tpu
@pytest.mark.parametrize(("topology", "model"), SHORT)
def test_warm_up_for_tpu(repo_root: Path, tmp_path: Path, topology: str, model: str) -> None:
    shapes = SHAPES if (topology, model) == ("v6e:2x4", "smollm2-135m") else SHAPES[1:]
    check(repo_root, *warmed(repo_root, tmp_path, topology, model, shapes))


@pytest.mark.tpu
@pytest.mark.long
@pytest.mark.parametrize(("topology", "model"), MATRIX)
def test_warm_up_matrix(repo_root: Path, tmp_path: Path, topology: str, model: str) -> None:
    shapes = [StepShape(t, s, 32, s) for t, s in ((1, 1), (8, 8), (64, 1), (64, 8))]
    check(repo_root, *warmed(repo_root, tmp_path, topology, model, shapes))
