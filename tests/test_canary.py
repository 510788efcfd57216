"""The canary on the real tiny engine: silent where all is well, loud where one program is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from buckets.cache_store import CacheStore
from buckets.compile_cache import CompileCache
from tests import tiny_model
from tests.engine_rig import Rig, make_rig
from tpu_engine.canary import (
    RECORD,
    Answer,
    CanaryFailed,
    canary_tokens,
    compare_with_earlier,
    weights_fingerprint,
)
from tpu_engine.step_program import StepState
from tpu_engine.weights.open_model import open_model

NAME = "a" * 64


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("canary"))


def test_tokens_are_of_the_vocabulary_and_differ() -> None:
    assert len(set(canary_tokens(512))) == 8
    assert set(canary_tokens(3)) <= {0, 1, 2}


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
def test_right_programs_pass(rig: Rig, options: dict[str, Any]) -> None:
    built = rig.build("odd shapes", **options)
    assert not built.loop.has_work


class Wrong:
    """Replaces the executable of one shape by what `change` makes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_tokens: int, change: Any) -> None:
        get = CompileCache.get

        def get_wrong(cache: CompileCache, shape: Any) -> Any:
            executable = get(cache, shape)
            return change(executable) if shape.num_tokens == num_tokens else executable

        monkeypatch.setattr(CompileCache, "get", get_wrong)


def writes_nothing(executable: Any) -> Any:
    """Indexed updates that silently do nothing."""

    def run(weights: Any, state: StepState, buffer: Any) -> Any:
        before = jnp.copy(state.cache)
        state, results = executable(weights, state, buffer)
        return StepState(before, state.last_tokens), results

    return run


def answers_something(executable: Any) -> Any:
    def run(*arguments: Any) -> Any:
        state, results = executable(*arguments)
        return state, results.at[0].add(1).at[1].add(1 << 20)

    return run


def is_undefined(executable: Any) -> Any:
    def run(*arguments: Any) -> Any:
        state, results = executable(*arguments)
        return state, results.at[2].set(0)

    return run


@pytest.mark.parametrize(
    ("num_tokens", "change", "message"),
    [
        (3, writes_nothing, "1 of 4 programs compute something else"),
        (100, answers_something, "1 of 4 programs compute something else"),
        (17, is_undefined, "infinite or undefined"),
    ],
)
def test_a_wrong_program_is_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_tokens: int, change: Any, message: str
) -> None:
    Wrong(monkeypatch, num_tokens, change)
    with pytest.raises(CanaryFailed, match=message) as error:
        rig.build("odd shapes")
    assert f"(tokens={num_tokens} " in str(error.value)
    assert all(f"(tokens={n} " not in str(error.value) for n in (3, 17, 100) if n != num_tokens)


def test_without_the_canary_nobody_looks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    Wrong(monkeypatch, 100, answers_something)
    rig.build("odd shapes", canary=False)


def test_an_earlier_answer_is_remembered(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    compare_with_earlier(Answer(5, -1.0), NAME, 0.01, store)
    compare_with_earlier(Answer(5, -1.005), NAME, 0.01, store)
    compare_with_earlier(Answer(9, -9.0), "b" * 64, 0.01, store)
    with pytest.raises(CanaryFailed, match=f"earlier start .*records/{RECORD}/{NAME}.json"):
        compare_with_earlier(Answer(5, -1.5), NAME, 0.01, store)
    compare_with_earlier(Answer(5, -1.5), NAME, 0.01, None)


def test_an_earlier_answer_refuses_a_start(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    rig.build("one shape", compile_cache=str(folder))
    [record] = (folder / "records" / RECORD).iterdir()
    CacheStore(folder).put_record(RECORD, record.stem, {"token_id": 1, "logprob": -77.0})
    with pytest.raises(CanaryFailed, match="at an earlier start"):
        rig.build("one shape", compile_cache=str(folder))
    record.unlink()
    rig.build("one shape", compile_cache=str(folder))


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    for folder in (one, same):
        tiny_model.write_hf(folder)
    tiny_model.write_hf(other, tiny_model.TinySpec(seed=7))
    prints = [weights_fingerprint(open_model(folder).source) for folder in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
