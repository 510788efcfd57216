"""The configured plan file: read, checked against the engine's budgets, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from buckets.plan import Plan, PlanLimits, default_plan
from buckets.plan_file import plan_to_yaml
from buckets.shape import StepShape
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.plans import choose_plan

LIMITS = PlanLimits(8, 64, 4)


def config_with(tmp_path: Path, text: str) -> EngineConfig:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return EngineConfig("m", plan=str(path))


def test_without_a_file_the_plan_is_derived() -> None:
    assert choose_plan(EngineConfig("m"), LIMITS) == default_plan(LIMITS)


def test_the_file_is_the_plan(tmp_path: Path) -> None:
    plan = Plan.of([StepShape(64, 8, 4, 8), StepShape(8, 8, 4, 8)])
    assert choose_plan(config_with(tmp_path, plan_to_yaml(plan)), LIMITS) == plan


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("schema_version: 9", "schema_version"),
        (plan_to_yaml(Plan.of([StepShape(32, 8, 4, 8)])), "32, falls short of 64"),
        (plan_to_yaml(Plan.of([StepShape(64, 8, 5, 8)])), "pages_per_seq must be 4"),
        (
            plan_to_yaml(Plan.of([StepShape(64, 8, 4, 8), StepShape(8, 8, 4, 8, "greedy")])),
            "variants this engine has",
        ),
    ],
)
def test_a_poor_file_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason) as error:
        choose_plan(config_with(tmp_path, text), LIMITS)
    assert "plan.yaml" in str(error.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="readable file"):
        choose_plan(EngineConfig("m", plan=str(tmp_path / "none")), LIMITS)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="text file"):
        choose_plan(EngineConfig("m", plan=str(tmp_path / "binary")), LIMITS)
