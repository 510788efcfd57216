"""The server on the real engine (tiny model): same tokens as offline, no compile while serving."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from server.client import EngineClient
from server.main import Server
from server.options import ServerOptions
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.engine_rig import Rig, make_rig, plan_of, prompts, requests, serve
from tests.server_rig import collect, ids_request
from tpu_engine.build import BuiltEngine, build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.request import SamplingParams

PLAN = "one shape"


@pytest.fixture(name="engines", scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("server"))


async def test_streams_equal_the_offline_engine_and_nothing_compiles(engines: Rig) -> None:
    asked = prompts(12)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=11, ignore_eos=True)
    offline = engines.build(PLAN)
    want = serve(offline, requests(asked, params))
    tokenizer = offline.model.tokenizer
    phases: list[str] = []

    def build(config: EngineConfig, report: Any) -> BuiltEngine:
        return build_engine(config, report, plan=plan_of(PLAN))

    server = Server(
        offline.config,
        ServerOptions(port=0),
        build=build,
        report=lambda progress: phases.append(progress.phase),
    )
    async with EngineClient(f"127.0.0.1:{await server.start()}") as client:
        await server.make_ready()
        assert {"weights", "compile", "ready"} <= set(phases)
        before = await client.status()
        options: dict[str, Any] = {
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": 11,
            "ignore_eos": True,
            "logprobs": True,
        }
        calls = [collect(client.generate(ids_request(ids, **options))) for ids in asked]
        answers = await asyncio.gather(*calls)
        for answer, tokens in zip(answers, want.values(), strict=True):
            assert answer.token_ids == tokens
            assert answer.text == tokenizer.decode(tokens)
            assert all(logprob <= 0 for logprob in answer.logprobs)
        turn = pb.ChatMessage(role="user", content="how are you")
        request = pb.GenerateRequest(chat=pb.Chat(messages=[turn]), max_tokens=8)
        chatted = await collect(client.generate(request))
        assert 1 <= chatted.finished.usage.num_output_tokens <= 8
        after = await client.status()
        assert after.compile_count == before.compile_count
        assert after.steps > before.steps
        assert after.free_pages == after.total_pages
        info = await client.model_info()
        assert len(info.shapes) == len(plan_of(PLAN).shapes)
        await server.drain(1.0)
        await server.stop()


async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    from tpu_engine.errors import InvalidModel

    config = EngineConfig(model=str(tmp_path / "nothing"))
    server = Server(config, ServerOptions(port=0))
    await server.start()
    with pytest.raises(InvalidModel, match="nothing"):
        await server.make_ready()
    await server.stop()
    assert cast(Any, server.lifecycle.serving) is None
