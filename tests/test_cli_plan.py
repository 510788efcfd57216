"""`tpu-engine plan show`: table, JSON, plan file; unknown facts are called so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from buckets.device_profile import DeviceProfile, ProfileTarget, ShapeProfile, profile_to_yaml
from buckets.plan import Plan, PlanLimits, default_plan
from buckets.plan_file import plan_file_from_yaml, plan_to_yaml
from buckets.shape import StepShape
from server.cli import app
from tests import tiny_model
from tpu_engine.plan_padding import predict_padding

SMALL, LARGE = StepShape(8, 8, 4, 8), StepShape(64, 8, 4, 8)
PLAN = Plan.of([SMALL, LARGE])
PROFILE = DeviceProfile(
    ProfileTarget("tiny", "v6e", "tensor=8", "jax 0.10.2"),
    {SMALL: ShapeProfile(compile_s=3.0, hbm_bytes=3 << 30, measured_step_s=0.0125)},
)


def show(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "show", *words], env={"COLUMNS": "120"})


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write_hf(folder)
    return str(folder)


def test_a_model_gets_its_default_plan(model: str):
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "128")
    result = show("--model", model, *limits, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["shapes"]
    plan = default_plan(PlanLimits(8, 64, 8))
    assert [(r["num_tokens"], r["num_seqs"]) for r in rows] == [
        (s.num_tokens, s.num_seqs) for s in plan.shapes
    ]
    assert {r["compile_s"] for r in rows} == {None}
    written = show("--model", model, *limits, "--yaml")
    assert plan_file_from_yaml(written.stdout).plan == plan


def test_the_table_says_unknown_where_nobody_looked(tmp_path: Path):
    file, profile = tmp_path / "plan.yaml", tmp_path / "profile.yaml"
    file.write_text(plan_to_yaml(PLAN))
    lines = show("--file", str(file)).stdout.splitlines()
    assert lines[1].split()[-2:] == ["unknown", "decode"]
    assert "no device profile" in lines[-1]
    profile.write_text(profile_to_yaml(PROFILE))
    lines = show("--file", str(file), "--profile", str(profile)).stdout.splitlines()
    assert lines[1].split()[-7:] == ["3.00", "GiB", "3.0", "s", "12.50", "ms", "decode"]
    assert lines[2].split()[-4:] == ["unknown", "unknown", "unknown", "mixed"]
    assert "tensor=8" in lines[-1]


def test_the_plan_file_of_the_configuration_is_checked(model: str, tmp_path: Path):
    file = tmp_path / "plan.yaml"
    file.write_text(plan_to_yaml(PLAN))
    result = show("--model", model, "--plan", str(file), "--max-num-seqs", "8")
    assert result.exit_code == 1
    assert "falls short of 256" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "model must be given, or --file"),
        (("--file", "missing.yaml"), "file must be a readable file"),
        (("--yaml", "--json", "--file", "x"), "yaml must be off"),
        (("--model", "x", "--file", "y"), "file must be given without a model"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str):
    result = show(*words)
    assert result.exit_code == 1
    assert message in result.stderr


def test_predicted_padding_is_what_the_scheduler_leaves_empty():
    plan = default_plan(PlanLimits(32, 256, 8))
    padding = predict_padding(plan)
    assert sum(p.share for p in padding.values()) == pytest.approx(1)
    assert all(0 <= p.mean <= p.worst < 1 for p in padding.values())
    one_row = padding[StepShape(1, 1, 8, 1)]
    assert one_row.worst == 0
    coarse = predict_padding(Plan.of([StepShape(256, 32, 8, 32)]))
    mean = {s: p.mean for s, p in coarse.items()}
    assert mean[StepShape(256, 32, 8, 32)] > max(p.mean for p in padding.values())
