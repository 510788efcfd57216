"""`tpu-engine doctor` on the tiny model: a healthy machine, and one whose kernels are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner, Result

from buckets.device_profile import profile_from_yaml
from buckets.shape import StepShape
from server.cli import app
from tests import tiny_model
from tpu_engine import kernel_check
from tpu_engine.step_timing import full_plan, median_step_s


@pytest.fixture(scope="module", name="cached")
def _cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    tiny_model.write_hf(folder / "model")
    return folder


def examine(cached: Path, report: Path, *more: str) -> Result:
    options = {
        "--model": cached / "model",
        "--compile-cache": cached / "cache",
        "--max-num-seqs": 2,
        "--max-num-batched-tokens": 16,
        "--max-model-len": 64,
        "--report": report,
        "--runs": 2,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return CliRunner().invoke(app, ["doctor", *words, *more])


def sections(report: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((report / "report.json").read_text())
    return {section["title"]: section for section in content["sections"]}


def test_a_healthy_machine_gets_a_report_and_a_profile(cached: Path, tmp_path: Path) -> None:
    result = examine(cached, tmp_path)
    assert result.exit_code == 0, result.output
    assert "healthy" in result.output
    found = sections(tmp_path)
    assert list(found) == ["machine", "memory", "kernels", "programs", "speed"]
    assert all(section["failure"] == "" for section in found.values())
    assert len(found["kernels"]["facts"]["results"]) == 4
    profile = profile_from_yaml((tmp_path / "profile.yaml").read_text())
    assert len(profile.shapes) == len(found["programs"]["facts"]["programs"])
    assert all((known.measured_step_s or 0) > 0 for known in profile.shapes.values())
    assert "## kernels: ok" in (tmp_path / "report.md").read_text()


def test_a_wrong_kernel_is_named_and_the_rest_is_examined(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernel_check.ragged_paged_attention

    def wrong(*arrays: Any, backend: str, **options: Any) -> Any:
        out, cache = right(*arrays, backend=backend, **options)  # type: ignore[arg-type]
        return (out, cache) if backend == "reference" else (jnp.roll(out, 1, axis=0), cache)

    monkeypatch.setattr(kernel_check, "ragged_paged_attention", wrong)
    result = examine(cached, tmp_path)
    assert result.exit_code == 1
    assert "not healthy: kernels" in result.output
    found = sections(tmp_path)
    assert "attention (xla), decode" in found["kernels"]["failure"]
    assert found["programs"]["failure"] == ""
    assert "## kernels: FAILED" in (tmp_path / "report.md").read_text()


def test_an_engine_that_can_not_be_built_is_reported(cached: Path, tmp_path: Path) -> None:
    result = examine(cached, tmp_path, "--num-pages", "2")
    assert result.exit_code == 1
    found = sections(tmp_path)
    assert found["machine"]["failure"] == ""
    assert "num_pages" in found["programs"]["failure"]
    assert "no engine" in found["speed"]["failure"]


def test_runs_must_be_at_least_one(cached: Path, tmp_path: Path) -> None:
    result = examine(cached, tmp_path, "--runs", "0")
    assert result.exit_code == 1
    assert "runs must be at least 1" in result.output


def test_a_full_plan_fills_its_shape() -> None:
    plan = full_plan(StepShape(100, 7, 4, 7), num_pages=3, page_size=16)
    assert plan.num_rows == 7
    assert plan.num_tokens.tolist() == [14, 14, 14, 14, 14, 14, 16]
    plan = full_plan(StepShape(100, 1, 4, 1), num_pages=9, page_size=16)
    assert plan.num_tokens.tolist() == [64]  # as far as the page table goes


def test_the_median_leaves_the_first_runs_out() -> None:
    class Instant:
        def dispatch(self, plan: Any) -> Any:
            return plan

        def collect(self, handle: Any) -> Any:
            return handle

    times = iter([0, 100, 100, 200, 200, 201, 201, 203, 203, 208])
    plan = full_plan(StepShape(1, 1, 1, 1), 3, 16)
    assert median_step_s(Instant(), plan, 3, lambda: float(next(times))) == 2.0
