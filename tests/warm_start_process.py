"""One start of the tiny engine, counted: a process of its own for `test_warm_start.py`.

    python -m tests.warm_start_process MODEL_DIR CACHE_DIR [--require-warm] [--wait-for FILE]

Builds the engine, freezes it and serves a few requests; prints one line of JSON: what JAX said it
compiled and lowered, and every token. Owns the engine and the requests of all these starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from buckets.plan import Plan
from buckets.shape import StepShape
from tests.compiler_events import CompilerEvents
from tests.engine_rig import serve
from tpu_engine.build import BuiltEngine, build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.request import Request, SamplingParams

MAX_MODEL_LEN = 64
SHAPES = tuple(StepShape(t, b, MAX_MODEL_LEN // 16, b) for t, b in ((1, 1), (16, 2)))
# Half the time of a cold start; what is counted stays the same.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
MAX_WAIT_S = 60.0


def build(model: Path, cache: Path, *, require_warm: bool = False) -> BuiltEngine:
    """The engine all starts build."""
    config = EngineConfig(
        model=str(model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        compile_cache=str(cache),
        require_warm=require_warm,
    )
    return build_engine(config, plan=Plan(SHAPES, FAST_COMPILE))


def mixed_requests() -> list[Request]:
    """Every kind of sampling; prompts of one token, at, before and past the ends of a chunk."""
    kinds = (
        SamplingParams(6),
        SamplingParams(1, ignore_eos=True),
        SamplingParams(9, temperature=0.9, seed=7, ignore_eos=True),
        SamplingParams(8, temperature=1.1, top_k=5, seed=8, ignore_eos=True),
        SamplingParams(8, temperature=0.7, top_p=0.8, seed=9, ignore_eos=True),
        SamplingParams(8, temperature=1.3, min_p=0.1, seed=10, ignore_eos=True),
        SamplingParams(7, temperature=1.0, top_k=40, top_p=0.9, min_p=0.02, seed=11),
        SamplingParams(20, ignore_eos=True),  # ends at the model's own limit
    )
    lengths = (1, 15, 16, 17, 33, 2, 40, 44)
    return [
        Request(number, tuple(range(number + 3, number + 3 + length)), params, 0.0)
        for number, (length, params) in enumerate(zip(lengths, kinds, strict=True), start=1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--require-warm", action="store_true")
    parser.add_argument("--wait-for", type=Path, help="announces itself, then waits for this file")
    given = parser.parse_args()
    if given.wait_for is not None:
        _wait_for(given.wait_for)
    with CompilerEvents() as events:
        try:
            engine = build(given.model, given.cache, require_warm=given.require_warm)
        except InvalidConfig as error:
            said: dict[str, object] = {"error": str(error)}
        else:
            tokens = serve(engine, mixed_requests())
            records = engine.executables.records
            said = {
                "sources": [record.source for record in records],
                "notes": [record.note for record in records if record.note],
                "tokens": {str(number): ids for number, ids in tokens.items()},
            }
    print(json.dumps({"compiled": events.compiled, "lowered": events.lowered, **said}))


def _wait_for(signal: Path) -> None:
    print("started", flush=True)
    deadline = time.monotonic() + MAX_WAIT_S
    while not signal.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{signal} never came")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
