"""A warm start of the real engine calls no compiler: JAX itself is asked, in separate processes.

Two processes start cold on one cache at the same time; every other start is warm, or must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny_model
from tests.compiler_events import CompilerEvents
from tests.warm_start_process import MAX_MODEL_LEN, SHAPES, build
from tpu_engine.build import BuiltEngine
from tpu_engine.messages import End, Submit
from tpu_engine.request import Finish, FinishReason, Request, SamplingParams

LIMIT_S = 150


@dataclass(frozen=True)
class Starts:
    """A model, a cache, and what the two said that started on it when it was empty."""

    model: Path
    cache: Path
    cold: list[dict[str, Any]]


def begin(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.warm_start_process", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent, text=True, env=os.environ
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    folder = tmp_path_factory.mktemp("starts")
    model, cache, signal = folder / "model", folder / "cache", folder / "go"
    tiny_model.write_hf(model)
    pair = [begin(model, cache, f"--wait-for={signal}") for _ in range(2)]
    try:
        for process in pair:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        signal.touch()
        return Starts(model, cache, [finish(process) for process in pair])
    finally:
        for process in pair:
            process.kill()


def test_two_cold_starts_on_one_cache_both_compile_and_serve(starts: Starts) -> None:
    one, other = starts.cold
    # Either may find what the other one was faster with, but hardly everything.
    assert one["compiled"] + other["compiled"] > len(SHAPES)
    assert one["lowered"] > 0
    assert other["lowered"] > 0
    assert "compiled" in one["sources"] + other["sources"]
    assert one["notes"] == other["notes"] == []
    assert one["tokens"] == other["tokens"]
    assert all(one["tokens"].values())


@pytest.mark.parametrize("options", [(), ("--require-warm",)])
def test_a_warm_start_compiles_and_lowers_nothing(starts: Starts, options: tuple[str, ...]) -> None:
    warm = finish(begin(starts.model, starts.cache, *options))
    assert (warm["compiled"], warm["lowered"]) == (0, 0)
    assert warm["sources"] == ["loaded"] * len(SHAPES)
    assert warm["notes"] == []
    assert warm["tokens"] == starts.cold[0]["tokens"]


def test_a_start_that_must_be_warm_names_every_shape_it_lacks(
    starts: Starts, tmp_path: Path
) -> None:
    refused = finish(begin(starts.model, tmp_path / "empty", "--require-warm"))
    assert refused["compiled"] == 0
    assert "require_warm" in refused["error"]
    for shape in SHAPES:
        assert f"({shape}): not in the cache" in refused["error"]


@st.composite
def any_requests(draw: st.DrawFn) -> list[tuple[int, Request, int | None]]:
    """Admissible requests: turns to wait before each, and turns until it is cancelled, if it is."""
    drawn: list[tuple[int, Request, int | None]] = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        length = draw(st.integers(1, MAX_MODEL_LEN - 1))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, min(12, MAX_MODEL_LEN - length))),
            temperature=draw(st.sampled_from((0.0, 0.3, 1.0, 2.0))),
            top_k=draw(st.sampled_from((0, 1, 50, 10_000))),
            top_p=draw(st.sampled_from((1.0, 0.9, 0.01))),
            min_p=draw(st.sampled_from((0.0, 0.05, 1.0))),
            seed=draw(st.integers(0, 2**32 - 1)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from(((), tuple(range(3, 100))))),
        )
        ids = tuple((number * 37 + i * 11) % 509 + 3 for i in range(length))
        cancel = draw(st.none() | st.integers(0, 6))
        drawn.append((draw(st.integers(0, 4)), Request(number, ids, params, 0.0), cancel))
    return drawn


def run(engine: BuiltEngine, arrivals: Iterable[tuple[int, Request, int | None]]) -> set[int]:
    """Serves them to their ends; the ids of those that ended."""
    messages: dict[int, list[Submit | End]] = {}
    turn, ended = 0, set[int]()
    for wait, request, cancel in arrivals:
        turn += wait
        messages.setdefault(turn, []).append(Submit(request))
        if cancel is not None:
            end = End(request.request_id, Finish(FinishReason.CANCELLED))
            messages.setdefault(turn + cancel, []).append(end)
    last = max(messages)
    for turn in range(2000):
        for output in engine.loop.turn(messages.get(turn, []), 0.0):
            if getattr(output, "finish", None) is not None:
                ended.add(output.request_id)
        if turn >= last and not engine.loop.has_work:
            return ended
    raise AssertionError("requests never ended")


def test_no_admissible_request_compiles_anything_after_the_freeze(starts: Starts) -> None:
    engine = build(starts.model, starts.cache)
    events = CompilerEvents()

    @settings(max_examples=40, deadline=None)
    @given(any_requests())
    def serves(arrivals: list[tuple[int, Request, int | None]]) -> None:
        assert run(engine, arrivals) == {request.request_id for _, request, _ in arrivals}
        assert not events.counts
        assert engine.misses.count == 0

    with events:
        serves()
    assert engine.compile_count() == 0
