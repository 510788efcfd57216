"""The real engine (tiny model): no compile in service, misses told, plans swapped under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from buckets.plan import Plan
from buckets.plan_file import plan_to_yaml
from buckets.shape import StepShape
from server.client import EngineClient
from server.main import Server
from server.options import ServerOptions
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.compiler_events import CompilerEvents
from tests.engine_rig import PAGES_PER_SEQ, Rig, make_rig, plan_of, prompts, requests, serve
from tests.server_rig import collect, ids_request
from tpu_engine.build import BuiltEngine, build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.messages import RequestOutput, Submit, UsePlan
from tpu_engine.request import FinishReason, SamplingParams

PLAN = "two shapes"
STRANGER = StepShape(8, 8, PAGES_PER_SEQ, 8)
TOP = plan_of(PLAN).shapes[-1]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(name="engines", scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("live"))


@pytest.fixture(name="compiles")
def _compiles() -> Iterator[CompilerEvents]:
    with CompilerEvents() as events:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
        assert events.compiled >= 1, "the counter is blind"
        yield events


def with_stranger(engine: BuiltEngine) -> None:
    """Lets the scheduler plan with a shape that has no executable, as it never should."""
    engine.loop.use_plan(UsePlan(Plan.of([*engine.plan.shapes, STRANGER])))


def test_a_miss_is_refused_named_and_counted(
    engines: Rig, compiles: CompilerEvents, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines.build(PLAN)
    with_stranger(engine)
    before = compiles.compiled
    (request,) = requests([(5, 6, 7)], PARAMS)
    outputs = [*engine.loop.turn([Submit(request)], 0.0), *engine.loop.turn([], 0.0)]
    (output,) = [o for o in outputs if isinstance(o, RequestOutput) and o.finish is not None]
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ERROR
    assert str(STRANGER) in output.finish.detail
    assert "not in the plan" in output.finish.detail
    (miss,) = engine.misses.recent
    assert (miss.shape, miss.request_ids, miss.outcome) == (STRANGER, (1,), "refused")
    (line,) = [r.getMessage() for r in caplog.records if "compile miss" in r.getMessage()]
    assert str(STRANGER) in line
    assert "requests 1" in line
    assert compiles.compiled == before
    engine.loop.use_plan(UsePlan(engine.plan))
    assert len(serve(engine, requests(prompts(3), PARAMS, first_id=2))) == 3


def test_a_miss_can_be_compiled_and_is_counted_timed_and_attributed(engines: Rig) -> None:
    asked = [(5, 6, 7), (8, 9)]
    want = serve(engines.build(PLAN), requests(asked, PARAMS))
    engine = engines.build(PLAN, on_miss="compile")
    count = engine.compile_count()
    unheard_of = StepShape(5, 5, PAGES_PER_SEQ, 5)
    engine.loop.use_plan(UsePlan(Plan.of([*engine.plan.shapes, unheard_of])))
    assert serve(engine, requests(asked, PARAMS)) == want
    (miss,) = engine.misses.recent
    assert miss.outcome == "compiled"
    assert miss.request_ids == (1, 2)
    assert engine.misses.seconds == miss.seconds > 0.01
    assert engine.compile_count() == count + 1
    engine.executables.release([unheard_of])
    serve(engine, requests(asked, PARAMS, first_id=3))
    assert engine.misses.count == 2
    assert "released" in engine.misses.recent[-1].why
    assert engine.misses.recent[-1].outcome == "loaded"


def test_a_shape_that_was_planned_and_never_warmed_says_so(engines: Rig) -> None:
    engine = engines.build(PLAN)
    engine.executables.plan([STRANGER])
    with_stranger(engine)
    engine.loop.turn([Submit(requests([(5, 6, 7)], PARAMS)[0])], 0.0)
    engine.loop.turn([], 0.0)
    assert "in the plan, but not warm" in engine.misses.recent[0].why


async def ended_change(client: EngineClient) -> pb.GetServerStatusResponse:
    """The status once no change of plan is under way."""
    while True:
        status = await client.status()
        if status.plan_change.phase not in ("warming", "taking over"):
            return status
        await asyncio.sleep(0.01)  # a client polls, as an operator would


def fuzzed(rng: random.Random) -> pb.GenerateRequest:
    """Anything a request may ask for."""
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 7, 30]),
        "temperature": rng.choice([0.0, 0.001, 0.7, 5.0]),
        "top_k": rng.choice([0, 1, 2, 40, 512]),
        "top_p": rng.choice([1.0, 0.5, 1e-6]),
        "min_p": rng.choice([0.0, 0.1, 1.0]),
        "seed": rng.choice([0, 1, 2**32 - 1]),
        "logprobs": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "stop": rng.choice([[], ["a"], ["never to be seen", "e "]]),
        "stop_token_ids": rng.choice([[], [9], list(range(300, 310))]),
        "include_stop_in_output": rng.random() < 0.5,
    }
    given = {name: value for name, value in options.items() if rng.random() < 0.7}
    given.setdefault("max_tokens", 9)
    length = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 200, 300, 400])
    return ids_request([rng.randrange(3, 512) for _ in range(length)], **given)


async def ask_all(client: EngineClient, asked: list[Any]) -> list[tuple[int, ...]]:
    answers = await asyncio.gather(*(collect(client.generate(r)) for r in asked))
    return [tuple(answer.token_ids) for answer in answers]


async def test_nothing_a_request_asks_for_compiles_and_a_swap_changes_no_token(
    engines: Rig, compiles: CompilerEvents
) -> None:
    """A fuzz of requests, and a swap in the middle of them."""
    rng = random.Random(4)
    asked = [fuzzed(rng) for _ in range(60)]
    for request in asked:
        if not request.HasField("seed"):
            request.seed = 3
    other = Plan.of([STRANGER, TOP])
    # What the new plan needs is in the store: the swap compiles nothing either.
    engines.build(PLAN).executables.build_missing(STRANGER)

    def build(config: EngineConfig, report: Any) -> BuiltEngine:
        return build_engine(config, report, plan=plan_of(PLAN))

    config = engines.build(PLAN).config
    server = Server(config, ServerOptions(port=0, allow_plan_swap=True), build=build)
    async with EngineClient(f"127.0.0.1:{await server.start()}") as client:
        await server.make_ready()
        before = compiles.compiled

        async def ask_until(done: asyncio.Event) -> list[list[tuple[int, ...]]]:
            rounds: list[list[tuple[int, ...]]] = []
            while not done.is_set():
                rounds.append(await ask_all(client, asked))
            return rounds

        first, done = await ask_all(client, asked), asyncio.Event()
        load = asyncio.create_task(ask_until(done))
        await asyncio.sleep(0.05)
        assert await client.swap_plan(plan_to_yaml(other)) == 1
        status = await ended_change(client)
        assert status.plan_change.phase == "done", status.plan_change.error
        done.set()
        for answers in [*(await load), await ask_all(client, asked)]:
            differing = [a for a, b in zip(first, answers, strict=True) if a != b]
            assert len(differing) <= 2, "more than rounding between shapes explains"
        assert compiles.compiled == before
        status = await client.status()
        assert status.miss_count == 0
        states = {s.shape.num_tokens: (s.in_plan, s.source, s.steps > 0) for s in status.shapes}
        assert states == {
            8: (True, "loaded", True),
            24: (False, "", True),
            256: (True, "loaded", True),
        }
        await server.drain(1.0)
        await server.stop()


async def test_a_partial_start_is_ready_before_the_rest_is_warm(engines: Rig) -> None:
    seen: list[Any] = []
    whole = Plan.of([*plan_of(PLAN).shapes, STRANGER])

    def build(config: EngineConfig, report: Any) -> BuiltEngine:
        return build_engine(config, report, plan=whole, partial=True)

    config = engines.build(PLAN).config
    server = Server(config, ServerOptions(port=0), build=build, report=seen.append)
    async with EngineClient(f"127.0.0.1:{await server.start()}") as client:
        await server.make_ready()
        assert seen[-1].detail.startswith("2 of 3 shapes")
        asked = prompts(6)
        want = serve(engines.build(PLAN), requests(asked, PARAMS))
        calls = [
            client.generate(
                ids_request(ids, max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
            )
            for ids in asked
        ]
        answers = await asyncio.gather(*map(collect, calls))
        assert [a.token_ids for a in answers] == list(want.values())
        status = await ended_change(client)
        assert (status.plan_change.phase, status.plan_change.kind) == ("done", "partial")
        assert sum(s.in_plan for s in status.shapes) == 3
        await server.drain(1.0)
        await server.stop()


def test_requiring_warm_and_compiling_misses_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="on_miss must be refuse where require_warm"):
        EngineConfig(model=str(tmp_path), require_warm=True, on_miss="compile")
    with pytest.raises(Exception, match="on_miss must be one of refuse, compile"):
        EngineConfig(model=str(tmp_path), on_miss="ignore")
