"""Another plan while requests are served: nothing is lost, nothing stays behind, all is told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from buckets.plan import Plan
from buckets.plan_file import plan_to_yaml
from buckets.shape import StepShape
from buckets.warm_order import opening_shapes
from server.cli import app
from server.main import Server
from server.options import ServerOptions
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.fake_runner import expected_tokens
from tests.server_rig import (
    CONFIG,
    Rig,
    collect,
    fake_engine,
    ids_request,
    running_server,
    serving,
)
from tests.test_server_life import SERVING, health
from tpu_engine.errors import InvalidConfig
from tpu_engine.request import Request, SamplingParams

WIDTH = 32
OTHER = Plan.of(StepShape(t, b, WIDTH, b) for t, b in [(3, 3), (12, 8), (20, 4), (64, 8)])
OLD = fake_engine().plan


def change_of(status: pb.GetServerStatusResponse) -> pb.PlanChange:
    return status.plan_change


async def answer(rig: Rig, number: int, num_prompt: int, max_tokens: int) -> None:
    """One request, which must get what it would get alone."""
    ids = [(7 * number + i) % 500 for i in range(num_prompt)]
    call = rig.client.generate(
        ids_request(ids, max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=number)
    )
    params = SamplingParams(max_tokens, seed=number, ignore_eos=True)
    expected = expected_tokens(Request(number, tuple(ids), params, 0.0))
    assert (await collect(call)).token_ids == expected


async def test_a_swap_under_load_loses_nothing_and_releases_the_old() -> None:
    async with running_server(step_s=0.002, allow_plan_swap=True) as rig:
        executables = rig.built.executables
        executables.gate.acquire()
        load = [
            asyncio.create_task(answer(rig, i, num_prompt=1 + 9 * i, max_tokens=40 + i))
            for i in range(16)
        ]
        await rig.wait_for(lambda s: s.running > 4)
        cold = set(OTHER.shapes) - set(OLD.shapes)
        assert await rig.client.swap_plan(plan_to_yaml(OTHER)) == len(cold)
        await rig.wait_for(lambda s: change_of(s).phase == "done")
        status = await rig.client.status()
        assert status.running, "the swap was over before the load: nothing was shown"
        assert executables.warm_shapes == set(OTHER.shapes)
        num_plans = len(rig.built.runner.plans)
        await asyncio.gather(*load)
        later = rig.built.runner.plans[num_plans:]
        assert later
        assert {plan.shape for plan in later} <= set(OTHER.shapes)
        info = await rig.client.model_info()
        assert [(s.num_tokens, s.num_seqs) for s in info.shapes] == [
            (s.num_tokens, s.num_seqs) for s in OTHER.shapes
        ]
        status = await rig.client.status()
        assert (change_of(status).kind, change_of(status).done) == ("swap", len(cold))
        used = [s for s in status.shapes if not s.in_plan]
        assert any(s.steps for s in used), "what ran at old shapes is remembered"
        assert all(s.source == "" for s in used)
        await rig.wait_idle()


async def test_one_change_at_a_time_and_a_failure_leaves_the_old_plan() -> None:
    async with running_server(allow_plan_swap=True) as rig:
        executables = rig.built.executables
        executables.gate = type(executables.gate)(1)
        executables.broken = {OTHER.shapes[-2]}
        before = executables.warm_shapes
        await rig.client.swap_plan(plan_to_yaml(OTHER))
        await rig.wait_for(lambda s: change_of(s).done == 1)
        status = await rig.client.status()
        assert change_of(status).phase == "warming"
        assert change_of(status).current.startswith("tokens=")
        assert change_of(status).seconds_left == pytest.approx(4.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.client.swap_plan(plan_to_yaml(OLD))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "another change of plan is running (swap, warming 1/3)" in str(
            caught.value.details()
        )
        executables.gate.release(10)
        await rig.wait_for(lambda s: change_of(s).phase == "failed")
        assert "no room for (tokens=20" in change_of(await rig.client.status()).error
        assert executables.warm_shapes == before, "what was warmed for nothing is let go"
        await answer(rig, 1, 20, 20)
        executables.broken = set()
        await rig.client.swap_plan(plan_to_yaml(OTHER))
        await rig.wait_for(lambda s: change_of(s).phase == "done")


REFUSED = {
    "budget": (plan_to_yaml(Plan.of([StepShape(32, 8, WIDTH, 8)])), "num_tokens"),
    "width": (plan_to_yaml(Plan.of([StepShape(64, 8, 16, 8)])), "pages_per_seq must be 32"),
    "key": ("schema_version: 2\nshapes: []\nshape: 1\n", "unknown key 'shape'"),
    "yaml": ("[", "YAML"),
    "length": ("#" * 200_000, "at most 131072 characters"),
    "options": (
        plan_to_yaml(Plan(OTHER.shapes, options={"xla_cpu_enable_fast_math": True})),
        "compiler_options",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_plan_that_cannot_be_served_is_refused_by_field(kind: str) -> None:
    text, expected = REFUSED[kind]
    async with running_server(allow_plan_swap=True) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.client.swap_plan(text)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "plan_yaml" in str(caught.value.details())
        assert expected in str(caught.value.details())
        assert change_of(await rig.client.status()).phase == "none"


async def test_nobody_swaps_where_it_was_not_allowed() -> None:
    async with running_server() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.client.swap_plan(plan_to_yaml(OTHER))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "allow_plan_swap" in str(caught.value.details())


async def test_a_partial_start_serves_and_grows_with_every_shape() -> None:
    config = replace(CONFIG, max_num_batched_tokens=64)
    async with running_server(config, serve_partial=True, allow_plan_swap=True) as rig:
        assert await health(rig.client) == SERVING
        await rig.wait_for(lambda s: change_of(s).phase == "done")
        assert rig.built.executables.warm_shapes == set(OLD.shapes)
        assert change_of(await rig.client.status()).kind == "partial"
        await answer(rig, 3, 1, 4)
        assert rig.built.runner.plans[-1].shape == StepShape(1, 1, WIDTH, 1)


def test_a_partial_start_contradicts_requiring_all_to_be_warm() -> None:
    with pytest.raises(InvalidConfig, match="serve_partial must be off where require_warm"):
        Server(replace(CONFIG, require_warm=True), ServerOptions(serve_partial=True))


async def test_a_partial_start_plans_with_warm_shapes_only() -> None:
    built = fake_engine(partial=True)
    opening = set(opening_shapes(OLD))
    built.executables.gate = type(built.executables.gate)(0)
    async with serving(built, CONFIG, serve_partial=True) as rig:
        await asyncio.gather(*(answer(rig, i, 5 * i + 1, 6) for i in range(4)))
        assert {plan.shape for plan in built.runner.plans} <= opening
        info = await rig.client.model_info()
        assert len(info.shapes) == len(opening)
        grown = len(built.runner.plans)
        built.executables.gate.release(2)
        await rig.wait_for(lambda s: change_of(s).done == 2)
        await rig.wait_for(lambda s: sum(shape.in_plan for shape in s.shapes) == len(opening) + 2)
        await answer(rig, 9, 1, 2)
        assert built.runner.plans[grown:]
        built.executables.broken = set(OLD.shapes)
        built.executables.gate.release(100)
        await rig.wait_for(lambda s: change_of(s).phase == "failed")
        await answer(rig, 10, 30, 3)


async def test_stopping_in_the_middle_of_a_change_ends_it() -> None:
    async with running_server(allow_plan_swap=True) as rig:
        rig.built.executables.gate = type(rig.built.executables.gate)(0)
        await rig.client.swap_plan(plan_to_yaml(OTHER))
        assert rig.server.is_changing_plan
        server, gate = rig.server, rig.built.executables.gate
    gate.release(100)
    for _ in range(200):
        if not server.is_changing_plan:
            break
        await asyncio.sleep(0.01)
    assert not server.is_changing_plan
    live = server.lifecycle.serving
    assert live is not None
    assert "the plan was not changed" in live.live.change.error


def run_cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


async def test_the_command_line_swaps_and_shows(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(plan_to_yaml(OTHER))
    async with running_server(allow_plan_swap=True) as rig:
        await answer(rig, 1, 30, 5)
        done = await asyncio.to_thread(run_cli, "plan", "swap", rig.address, str(file))
        assert done.exit_code == 0, done.output
        assert "accepted: 3 shapes to warm" in done.output
        assert "swap, done, 3/3 shapes warmed" in done.output
        shown = await asyncio.to_thread(run_cli, "status", rig.address)
        assert shown.exit_code == 0, shown.output
        assert "ready for" in shown.output
        assert "change of plan: swap, done, 3/3 shapes warmed" in shown.output
        assert "compile misses: 0" in shown.output
        as_json = await asyncio.to_thread(run_cli, "status", rig.address, "--json")
        status = json.loads(as_json.output)
        assert status["plan_change"]["phase"] == "done"
        assert sum(int(s["steps"]) for s in status["shapes"]) == int(status["steps"]) > 0
        rig.built.executables.broken = set(OLD.shapes)
        file.write_text(plan_to_yaml(OLD))
        failed = await asyncio.to_thread(run_cli, "plan", "swap", rig.address, str(file))
        assert failed.exit_code == 1
        assert "no room for" in failed.output


async def test_figures_of_shapes_add_up() -> None:
    async with running_server() as rig:
        await asyncio.gather(*(answer(rig, i, 3 * i + 1, 9) for i in range(6)))
        await rig.wait_idle()
        status = await rig.client.status()
        for name in ("steps", "useful_tokens", "executed_tokens"):
            assert sum(getattr(s, name) for s in status.shapes) == getattr(status, name) > 0
        for shape in status.shapes:
            assert shape.executed_tokens == shape.steps * shape.shape.num_tokens
        assert 0 < sum(s.step_s for s in status.shapes) <= status.uptime_s
        assert status.compile_s == 2.0 * len(OLD.shapes)
        assert status.load_count == status.miss_count == 0
