"""`tpu-engine cache explain`: every reason for a miss has a name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner, Result

from buckets import program_key
from buckets.cache_store import CacheStore
from buckets.executable import ExecutableSource
from buckets.shape import StepShape
from server.cli import app
from server.cli.tpu_compiler import warm_up_variables
from tests.tiny_model import TinySpec, write_hf
from tpu_engine.config import EngineConfig
from tpu_engine.prepare import prepare
from tpu_engine.weights.open_model import describe_model

LIMITS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 4,
    "max_model_len": 64,
    "num_pages": 20,
}
FLAGS = [
    word for name, value in LIMITS.items() for word in (f"--{name}".replace("_", "-"), str(value))
]

Place = tuple[Path, Path, list[StepShape]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model, a cache with its smallest program, and all shapes, that one first."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("cache")
    write_hf(model, TinySpec(num_layers=1))
    found = describe_model(model)
    config = EngineConfig(str(model), compile_cache=str(folder), **LIMITS)
    target = prepare(config, found.config, found.num_token_ids, jax.devices())
    store = CacheStore(folder)
    ExecutableSource(target, store).obtain(target.plan.shapes[0])
    return model, folder, list(target.plan.shapes)


def invoke(place: Place, *words: str) -> Result:
    shape = str(place[2][0]).split() if "--all" not in words else []
    given = [word for word in words if word != "--all"]
    fixed = ["cache", "explain", *shape, "--model", str(place[0]), "--cache", str(place[1])]
    return CliRunner().invoke(app, [*fixed, *FLAGS, *given], env={"COLUMNS": "200"})


def test_a_stored_program_is_found(place: Place) -> None:
    result = invoke(place)
    assert result.exit_code == 0, result.output
    assert f"({place[2][0]}) stored as " in result.stdout


def test_a_shape_that_was_never_stored_is_said_to_be(place: Place) -> None:
    result = invoke(place, "--all")
    assert result.exit_code == 1
    assert f"({place[2][0]}) stored as " in result.stdout
    assert f"({place[2][1]}) not stored: no program of this shape is" in result.stdout
    assert len(result.stdout.splitlines()) == len(place[2])


def test_another_version_makes_a_miss_with_that_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = program_key.version("jaxlib")
    monkeypatch.setattr(program_key, "version", lambda name: "9.9" if name == "jaxlib" else "1.0")
    result = invoke(place)
    assert result.exit_code == 1
    assert "    versions: " in result.stdout
    assert f"jaxlib {ours} -> " in result.stdout
    assert "jaxlib 9.9" in result.stdout


def test_another_flag_makes_a_miss_with_that_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    result = invoke(place)
    assert result.exit_code == 1
    assert "    flags: (nothing) -> XLA_FLAGS=--xla_cpu_enable_fast_math=true" in result.stdout


def test_another_option_of_the_engine_is_another_program(place: Place) -> None:
    result = invoke(place, "--dtype", "bfloat16")
    assert result.exit_code == 1
    assert "    program: " in result.stdout
    assert "versions" not in result.stdout


def test_json_has_it_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    (row,) = json.loads(invoke(place, "--json").stdout)
    assert row["shape"] == str(place[2][0])
    assert row["is_stored"] is False
    assert [one["component"] for one in row["differences"]] == ["flags"]
    assert row["nearest"] in CacheStore(place[1]).digests()


def test_a_damaged_program_is_stored_and_of_no_use(place: Place) -> None:
    (digest,) = CacheStore(place[1]).digests()
    path = place[1] / "entries" / f"{digest}.executable"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    try:
        result = invoke(place)
        assert path.exists()  # explaining moves nothing
    finally:
        path.write_bytes(whole)
    assert result.exit_code == 1
    assert "but can't be used: holds" in result.stdout


def test_a_shape_outside_the_plan_is_refused_with_the_plan(place: Place) -> None:
    result = invoke(place, "--all", "tokens=9999")
    assert result.exit_code == 1
    assert f"shape must be one of the plan: ({place[2][0]})" in result.stderr


def test_two_names_of_the_folder_must_agree(place: Place) -> None:
    result = invoke(place, "--compile-cache", "elsewhere")
    assert result.exit_code == 1
    assert "cache must be elsewhere, as compile_cache" in result.stderr


@pytest.mark.tpu
def test_programs_for_devices_that_are_not_here_are_explained(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in warm_up_variables(os.environ).items():
        monkeypatch.setenv(name, value)  # and takes it away again
    result = invoke(place, "--topology", "v6e:2x2", "--mesh", "tensor=2", "--json")
    (row,) = json.loads(result.stdout)
    found = {one["component"]: one["change"] for one in row["differences"]}
    assert found["devices"].endswith("-> TPU v6 lite x 2, 2x1x1")
    assert found["mesh"] == "tensor=1 -> tensor=2"
    assert "libtpu" in found["versions"]
    assert {"program", "host"} <= found.keys()
