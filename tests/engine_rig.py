"""Builds real engines on the tiny model and runs prompts through them, offline.

Owns the prompts and the plans that engine tests share. Executables are kept in one folder per
test session, so that a plan is compiled once however many engines use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from buckets.plan import Plan
from buckets.shape import StepShape
from tests import tiny_model
from tpu_engine.build import BuiltEngine, build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.messages import RequestOutput, Submit
from tpu_engine.request import Request, SamplingParams

MAX_MODEL_LEN = 512
PAGES_PER_SEQ = MAX_MODEL_LEN // 16
# (tokens, rows) of the shapes; every plan ends at 256 tokens and 24 rows.
PLANS = {
    "usual": [(1, 1), (8, 8), (24, 24), (64, 8), (256, 24)],
    "one shape": [(256, 24)],
    "two shapes": [(24, 24), (256, 24)],
    "odd shapes": [(3, 2), (17, 5), (100, 24), (256, 24)],
}


def plan_of(name: str) -> Plan:
    """One of `PLANS` for the tiny model."""
    return Plan.of(StepShape(t, b, PAGES_PER_SEQ, b) for t, b in PLANS[name])


@dataclass(frozen=True)
class Rig:
    """Where the tiny model and the executables of this test session lie."""

    model_dir: Path
    cache_dir: Path

    def build(self, plan: str = "usual", **options: object) -> BuiltEngine:
        config = EngineConfig(
            model=str(self.model_dir),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=24,
            max_num_batched_tokens=256,
            num_pages=24 * PAGES_PER_SEQ + 1,
            compile_cache=str(self.cache_dir),
        )
        return build_engine(replace(config, **options), plan=plan_of(plan))


def make_rig(folder: Path) -> Rig:
    """Writes the tiny model below `folder`."""
    model_dir = folder / "model"
    tiny_model.write_hf(model_dir)
    return Rig(model_dir, folder / "executables")


def prompts(count: int = 20, seed: int = 1) -> list[tuple[int, ...]]:
    """Prompts of mixed lengths (1 to 300 tokens), some of them exactly at page borders."""
    rng = np.random.default_rng(seed)
    lengths = [1, 15, 16, 17, 32, 64, 129, 255, 256, 257, 300]
    lengths += rng.integers(2, 120, size=count).tolist()
    return [tuple(rng.integers(3, 512, size=n).tolist()) for n in lengths[:count]]


def requests(
    all_prompts: Iterable[tuple[int, ...]], params: SamplingParams, first_id: int = 1
) -> list[Request]:
    """One request per prompt; ids count from `first_id`."""
    return [
        Request(request_id=i, prompt_ids=prompt, params=params, arrival_s=0.0)
        for i, prompt in enumerate(all_prompts, start=first_id)
    ]


def serve(engine: BuiltEngine, batch: Iterable[Request]) -> dict[int, list[int]]:
    """Submits all requests at once and returns the tokens of each when all have ended."""
    tokens: dict[int, list[int]] = {}
    messages = []
    for request in batch:
        tokens[request.request_id] = []
        messages.append(Submit(request))
    open_ids = set(tokens)
    for _ in range(20_000):
        for output in engine.loop.turn(messages, 0.0):
            assert isinstance(output, RequestOutput), output
            tokens[output.request_id] += output.token_ids
            if output.finish is not None:
                open_ids.remove(output.request_id)
        messages = []
        if not open_ids and not engine.loop.has_work:
            return tokens
    raise AssertionError(f"requests {sorted(open_ids)} never ended")
