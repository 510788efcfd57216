"""How far the cost model is off on the real CPU engine, step by step under mixed load.

    python -m benchmarks.cost_error --json FILE [--model DIR]

Requests of mixed lengths come at random times; every step is predicted before it is dispatched and
compared with what it took. Without `--model` a small random Llama is written and served. Owns the
load and the JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import environment
from tests import tiny_model
from tpu_engine.build import build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.engine_loop import EngineLoop, StepRecord
from tpu_engine.messages import Submit
from tpu_engine.request import Request, SamplingParams

LEARNING_STEPS, MEASURED_STEPS = 200, 400
MAX_MODEL_LEN = 1024


def mixed_requests(count: int, seed: int) -> deque[Request]:
    """Log-normal prompts (median 90 tokens) and outputs (median 20)."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.5, 1.0, count), 2, 800).astype(int).tolist()
    outputs = np.clip(rng.lognormal(3.0, 0.8, count), 2, 150).astype(int).tolist()
    return deque(
        Request(
            i,
            tuple(rng.integers(3, 500, n).tolist()),
            SamplingParams(m, seed=i, ignore_eos=True),
            0.0,
        )
        for i, (n, m) in enumerate(zip(prompts, outputs, strict=True), start=1)
    )


def run(loop: EngineLoop, requests: deque[Request], num_steps: int) -> list[StepRecord]:
    """Keeps four to twelve requests open until that many steps are recorded."""
    loop.records = deque(maxlen=num_steps + 1)
    rng = np.random.default_rng(1)
    target = 8
    while len(loop.records) < num_steps:
        if rng.random() < 0.05:
            target = int(rng.integers(4, 13))
        room = max(0, target - len(loop.live_ids))
        due = [Submit(requests.popleft()) for _ in range(min(room, len(requests)))]
        loop.turn(due, time.monotonic)
    return list(loop.records)[:num_steps]


def errors(records: list[StepRecord]) -> list[float]:
    """Relative errors of the predictions."""
    return [abs(r.predicted_s / r.added_s - 1) for r in records if r.added_s > 0]


def main(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    model: str | None = None,
    cache: Annotated[str, typer.Option(help="Folder of compiled programs.")] = "",
    seed: int = 0,
) -> None:
    """Prints and writes the median relative error after the learning steps."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = str(Path(folder) / "model")
            spec = tiny_model.TinySpec(num_layers=4, hidden_size=128, intermediate_size=512)
            tiny_model.write_hf(Path(model), spec)
        config = EngineConfig(
            model=model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            compile_cache=cache,
        )
        before_s = environment.calibration_s()
        loop = build_engine(config).loop
        records = run(loop, mixed_requests(2000, seed), LEARNING_STEPS + MEASURED_STEPS)
    found = errors(records[LEARNING_STEPS:])
    quartiles = statistics.quantiles(found, n=20)
    report = {
        "schema_version": 1,
        "learning_steps": LEARNING_STEPS,
        "measured_steps": MEASURED_STEPS,
        "median_relative_error": round(statistics.median(found), 4),
        "p90_relative_error": round(quartiles[17], 4),
        "median_relative_error_while_learning": round(
            statistics.median(errors(records[:LEARNING_STEPS])), 4
        ),
        "is_trusted": loop.cost.is_trusted,
        "median_step_ms": round(1e3 * statistics.median(r.added_s for r in records), 3),
        "shapes": len({r.shape for r in records}),
        "load": "4 to 12 open requests, log-normal prompts (median 90) and outputs (median 20)",
        "calibration_s": [round(before_s, 3), round(environment.calibration_s(), 3)],
        "processor": environment.processor(),
        "versions": environment.versions(),
    }
    text = json.dumps(report, indent=2)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
