"""The real engine on the tiny model: same request, same answer, and never a compile in service."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine_rig import PAGES_PER_SEQ, PLANS, Rig, make_rig, prompts, requests, serve
from tpu_engine.errors import InvalidConfig, InvalidModel
from tpu_engine.messages import End, RequestOutput, Submit
from tpu_engine.request import Finish, FinishReason, SamplingParams

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=1234)


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session", params=["greedy", "seeded"])
def answers(rig: Rig, request: pytest.FixtureRequest) -> tuple[SamplingParams, dict]:
    """Every prompt served alone, without overlap: what all other ways must reproduce."""
    params = {"greedy": GREEDY, "seeded": SEEDED}[request.param]
    engine = rig.build(overlap=False)
    alone: dict[int, list[int]] = {}
    for one in requests(prompts(), params):
        alone |= serve(engine, [one])
    assert {len(tokens) for tokens in alone.values()} == {GREEDY.max_tokens}
    assert len({tuple(tokens) for tokens in alone.values()}) > 15
    return params, alone


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_batched_in_any_order_and_bucket(rig: Rig, answers: tuple, plan: str, overlap: bool):
    params, alone = answers
    engine = rig.build(plan, overlap=overlap)
    batch = requests(prompts(), params)
    for seed in range(3):
        random.Random(seed).shuffle(batch)
        assert serve(engine, batch) == alone
        status = engine.loop.status()
        assert status.free_pages == status.total_pages


@pytest.mark.parametrize("max_chunk", [16, 64, 256])
def test_any_chunk_size(rig: Rig, answers: tuple, max_chunk: int) -> None:
    params, alone = answers
    assert serve(rig.build(max_chunk=max_chunk), requests(prompts(), params)) == alone


def test_any_page_size(rig: Rig, answers: tuple) -> None:
    params, alone = answers
    # The plan's page table is 32 wide: pages of 32 hold twice the length.
    engine = rig.build("one shape", page_size=32, max_model_len=1024, num_pages=600)
    assert serve(engine, requests(prompts(), params)) == alone


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempted_and_recomputed(rig: Rig, params: SamplingParams) -> None:
    long_answers = replace(params, max_tokens=70)
    batch = requests([prompt[:40] for prompt in prompts()], long_answers)
    roomy = serve(rig.build(), batch)
    engine = rig.build("one shape", num_pages=PAGES_PER_SEQ + 1)
    assert serve(engine, batch) == roomy
    status = engine.loop.status()
    assert status.preemptions > 0
    assert status.free_pages == status.total_pages == PAGES_PER_SEQ


def test_second_engine_compiles_nothing(rig: Rig) -> None:
    rig.build()
    assert rig.build().compile_count() == 0


def test_nothing_compiles_in_service(rig: Rig) -> None:
    """JAX's own counter of compilations, not ours."""
    engine = rig.build()
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(1)
        assert compiled, "the counter does not count"
        compiled.clear()
        mixed = [
            replace(one, params=params)
            for one, params in zip(
                requests(prompts(40, seed=9), GREEDY),
                [GREEDY, SEEDED, replace(SEEDED, top_k=0, min_p=0.5, seed=7)] * 14,
                strict=False,
            )
        ]
        serve(engine, mixed)
        assert compiled == []
        assert engine.compile_count() == 0
    finally:
        jax.monitoring.clear_event_listeners()


def test_random_cancels_leak_nothing(rig: Rig) -> None:
    engine = rig.build()
    rng = random.Random(4)
    batch = requests(prompts(200, seed=3), GREEDY)
    live: list[int] = []
    ended = 0
    for turn in range(4000):
        messages = []
        if batch and len(live) < 40:
            one = batch.pop()
            live.append(one.request_id)
            messages.append(Submit(one))
        if live and rng.random() < 0.5:
            victim = rng.choice(live)
            messages.append(End(victim, Finish(FinishReason.CANCELLED)))
        for output in engine.loop.turn(messages, float(turn)):
            assert isinstance(output, RequestOutput)
            if output.finish is not None:
                ended += 1
                live.remove(output.request_id)
        if not batch and not live and not engine.loop.has_work:
            break
    assert ended == 200
    status = engine.loop.status()
    assert status.free_pages == status.total_pages
    assert (status.running, status.waiting) == (0, 0)


def test_int8_weights_are_the_same_in_any_bucket(rig: Rig) -> None:
    batch = requests(prompts(), GREEDY)
    usual = serve(rig.build("one shape", quantize="int8"), batch)
    assert serve(rig.build("two shapes", quantize="int8"), batch) == usual


def test_padding_rows_of_an_embedding_are_never_sampled(rig: Rig, tmp_path: Path) -> None:
    """A head padded past the tokenizer, with rows that would win every time."""
    pad, tensors = 64, load_file(rig.model_dir / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = np.full((pad, tensors[name].shape[1]), 3.0, np.float32)
        tensors[name] = np.concatenate([tensors[name], rows, -rows])
    shutil.copytree(rig.model_dir, tmp_path / "padded")
    save_file(tensors, tmp_path / "padded" / "model.safetensors")
    config = json.loads((rig.model_dir / "config.json").read_text())
    config["vocab_size"] += 2 * pad
    (tmp_path / "padded" / "config.json").write_text(json.dumps(config))
    padded = replace(rig, model_dir=tmp_path / "padded").build("one shape")
    for params in (GREEDY, SEEDED):
        batch = requests(prompts(), params)
        assert serve(padded, batch) == serve(rig.build("one shape"), batch)


def test_what_cannot_be_served_is_refused_before_loading(rig: Rig) -> None:
    with pytest.raises(InvalidConfig, match="max_model_len"):
        rig.build(max_model_len=2048)
    with pytest.raises(InvalidConfig, match="num_pages"):
        rig.build(num_pages=20)
    with pytest.raises(InvalidConfig, match="tensor_parallel"):
        rig.build(tensor_parallel=1024)
    with pytest.raises(InvalidModel, match="no_such_model"):
        rig.build(model="no_such_model")
