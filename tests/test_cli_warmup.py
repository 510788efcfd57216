"""`tpu-engine warmup` for this machine's CPU, and what it prepares for machines elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from buckets.plan import Plan
from buckets.plan_file import plan_file_from_yaml, plan_to_yaml
from buckets.shape import StepShape
from server.cli import app, tpu_compiler, warmup
from server.cli.flags import read_file, read_options
from tests import tiny_model
from tpu_engine.build import build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.models.config import ModelConfig
from tpu_engine.topology import target_devices
from tpu_engine.warm_up import most_devices, with_mesh
from tpu_engine.weights.json_file import read_json_object

OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets variables of its own process, which here is the tests'."""
    for name in tpu_compiler.warm_up_variables({}):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def config_of(repo_root: Path, name: str) -> ModelConfig:
    path = repo_root / "tests/fixtures/model_configs" / name / "config.json"
    return ModelConfig.from_hf(read_json_object(path))


def run(*arguments: str) -> tuple[int, str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    result = CliRunner().invoke(app, ["warmup", *arguments, *flags])
    return result.exit_code, result.output


def test_a_warm_up_without_weights_is_all_a_server_needs(tmp_path: Path) -> None:
    model = tiny_model.write_hf(tmp_path / "model")
    (tmp_path / "described").mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / "described" / name).write_bytes((model / name).read_bytes())
    cache, report, plan = tmp_path / "cache", tmp_path / "report.json", tmp_path / "plan.yaml"
    plan.write_text("# by hand\n" + plan_to_yaml(Plan.of([StepShape(8, 2, 4, 2)])))
    where = (f"--cache={cache}", f"--json={report}", f"--plan={plan}")
    given = (str(tmp_path / "described"), *where, "--jobs=1")

    code, said = run(*given)
    assert code == 0, said
    first = json.loads(report.read_text())
    assert (first["built"], first["reused"], first["failures"]) == (1, 0, [])
    (row,) = first["shapes"]
    assert row["shape"]["num_tokens"] == 8
    assert row["variant"] == "full"
    assert row["compile_s"] > 0
    assert row["hbm_bytes"] > 0
    assert {"code_bytes", "estimated_step_s", "roofline_step_s"} <= row.keys()

    code, said = run(*given)
    assert code == 0
    assert "nothing to do" in said
    second = json.loads(report.read_text())
    assert (second["built"], second["reused"]) == (0, 1)

    kept = plan_file_from_yaml(plan.read_text())
    assert plan.read_text().startswith("# by hand\n")
    assert kept.profile is not None
    assert kept.profile.target.chip == "cpu"
    assert kept.profile.of(StepShape(8, 2, 4, 2)).hbm_bytes == row["hbm_bytes"]

    config = EngineConfig(
        str(model), plan=str(plan), compile_cache=str(cache), require_warm=True, **OPTIONS
    )
    assert build_engine(config).compile_count() == 0


def test_a_missing_tokenizer_is_said_aloud(tmp_path: Path, repo_root: Path) -> None:
    model = repo_root / "tests/fixtures/model_configs/smollm2-135m"
    code, said = run(str(model), f"--cache={tmp_path}", "--mesh=tensor=2")
    assert code == 1
    assert "tokenizer.json is missing" in said


def test_the_mesh_is_as_large_as_the_model_allows(repo_root: Path) -> None:
    llama, small = config_of(repo_root, "llama-3.1-8b"), config_of(repo_root, "smollm2-135m")
    assert [most_devices(llama, n) for n in (1, 4, 8, 16)] == [1, 4, 8, 8]
    assert [most_devices(small, n) for n in (1, 4, 6)] == [1, 1, 3]
    config = EngineConfig("m")
    assert with_mesh(config, llama, None, 8).tensor_parallel == 8
    assert with_mesh(config, llama, "tensor=2", 8).tensor_parallel == 2
    chosen = EngineConfig("m", tensor_parallel=4)
    assert with_mesh(chosen, llama, None, 8) == chosen


@pytest.mark.parametrize("mesh", ["data=8", "tensor", "tensor=0", "tensor=two", "tensor=2"])
def test_a_poor_mesh_is_refused(repo_root: Path, mesh: str) -> None:
    config = EngineConfig("m", tensor_parallel=4)
    with pytest.raises(InvalidConfig, match="mesh"):
        with_mesh(config, config_of(repo_root, "llama-3.1-8b"), mesh, 8)


def test_an_unknown_topology_is_refused_with_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="v6e:2x2"):
        target_devices("v9z:2x2")
    assert [device.platform for device in target_devices("cpu")][:1] == ["cpu"]


def test_two_names_of_one_folder_must_agree() -> None:
    code, said = run("nowhere", "--cache=a", "--compile-cache=b")
    assert code == 1
    assert "neither an existing directory" in said or "as compile_cache" in said


def test_jobs_are_bounded_by_memory_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_available_bytes", lambda: 3 * warmup.JOB_BYTES)
    assert warmup.num_jobs(8, 24) == 3
    assert warmup.num_jobs(8, 2) == 2
    assert warmup.num_jobs(None, 24) == min(os.cpu_count() or 1, 3)
    monkeypatch.setattr(warmup, "_available_bytes", lambda: 0)
    assert warmup.num_jobs(8, 24) == 1


def test_the_compiler_gets_what_jax_gives_it_on_a_tpu_host() -> None:
    flag = "--xla_tpu_use_enhanced_launch_barrier"
    assert tpu_compiler.warm_up_variables({})["LIBTPU_INIT_ARGS"] == f"{flag}=true"
    given = {"LIBTPU_INIT_ARGS": f"--a {flag}=false"}
    assert tpu_compiler.warm_up_variables(given)["LIBTPU_INIT_ARGS"] == f"--a {flag}=false"


def test_the_job_for_kubernetes_is_one_we_accept(repo_root: Path, tmp_path: Path) -> None:
    text = (repo_root / "deploy/warmup-job.yaml").read_text()
    config_map, claim, job = list(yaml.safe_load_all(text))
    options = tmp_path / "server.yaml"
    options.write_text(config_map["data"]["server.yaml"])
    (config,) = read_options([EngineConfig], {}, None or options)
    assert config.tensor_parallel == 8
    assert read_file(options)["compile_cache"] == "/cache"

    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["tpu-engine", "warmup"]
    given = parsed(container["args"])
    assert given["topology"] == "v6e:2x4"
    assert with_mesh(config, config_of(repo_root, "llama-3.1-8b"), given["mesh"], 8) == config
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    cache = volumes[mounts["/cache"]]["persistentVolumeClaim"]["claimName"]
    assert cache == claim["metadata"]["name"]
    assert volumes["options"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert given["config"] == Path("/etc/tpu-engine/server.yaml")
    memory = int(container["resources"]["requests"]["memory"].removesuffix("Gi")) << 30
    assert warmup.JOB_BYTES * given["jobs"] <= memory
    assert pod["restartPolicy"] == "Never"
    assert job["spec"]["backoffLimit"] > 0


def parsed(arguments: list[str]) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    return command.commands["warmup"].make_context("warmup", list(arguments)).params
