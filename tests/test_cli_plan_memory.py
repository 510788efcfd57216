"""`tpu-engine plan memory`: the verdict a server would come to, from a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import app, plan_memory
from tests import tiny_model

OPTIONS = ("--max-num-seqs=2", "--max-num-batched-tokens=8", "--max-model-len=64")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plan_memory, "warm_up_variables", lambda given: {})
    tiny_model.write_json(tmp_path / "config.json", tiny_model.config_json())
    tiny_model.tokenizer().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def run(model: str, *more: str) -> tuple[int, str]:
    cache = f"--compile-cache={model}/cache"
    given = ["plan", "memory", model, cache, *OPTIONS, *more]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "120"})
    return result.exit_code, result.stdout


def test_every_part_is_named_and_the_parts_are_the_whole(model: str) -> None:
    code, said = run(model, "--json")
    assert code == 0
    content: dict[str, Any] = json.loads(said)
    names = ("weight", "kv", "temp", "code", "reserve", "free")
    assert sum(content[f"{name}_bytes"] for name in names) == content["capacity_bytes"]
    assert content["num_pages"] == 2 * 4 + 1
    assert content["fits"]
    assert {shape["is_compiled"] for shape in content["shapes"]} == {False}

    code, said = run(model)
    assert code == 0
    for words in ("weights", "9 pages", "allowance", "not in the cache", "it fits"):
        assert words in said


def test_what_does_not_fit_is_an_exit_code_and_advice(model: str) -> None:
    code, said = run(model, "--num-pages=100000000")
    assert code == 1
    assert "it does not fit: lower num_pages to" in said
