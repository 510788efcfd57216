"""Measures our engine without a server: the path of `generate` and `batch`.

    python -m benchmarks.ours.offline_driver CONFIG.yaml WORKLOAD.json

Owns the measuring; prints the lines of `benchmarks.ours.events`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import yaml

from benchmarks.ours import events
from benchmarks.ours.bare_steps import RecordingRunner, bare_seconds
from tpu_engine.build import BuiltEngine, build_engine, new_loop
from tpu_engine.config import EngineConfig
from tpu_engine.front import Ask, TokenPrompt
from tpu_engine.front_engine import open_intake
from tpu_engine.front_offline import OfflineEngine
from tpu_engine.request import FinishReason


class Bench:
    """One built engine behind a runner that records its plans."""

    def __init__(self, built: BuiltEngine) -> None:
        config = built.config
        self._built = built
        self._runner = RecordingRunner(built.runner)
        loop = new_loop(config, built.plan, self._runner, built.compile_count)
        self._engine: OfflineEngine[int] = OfflineEngine(
            loop, open_intake(built), max_open=config.max_num_seqs
        )

    def token_times(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """Generates exactly `num_tokens` per prompt; seconds from the start to each token."""
        self._runner.clear()
        asks = [
            (key, Ask(TokenPrompt(tuple(ids)), num_tokens, temperature=0.0, ignore_eos=True))
            for key, ids in enumerate(prompts)
        ]
        times: list[float] = []
        begin = time.perf_counter()
        for _, piece in self._engine.run(asks):
            if isinstance(piece, Exception):
                raise piece
            times += [time.perf_counter() - begin] * len(piece.token_ids)
            done = piece.completion
            if done is not None and done.finish.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"a request ended with {done.finish}")
        if len(times) != len(prompts) * num_tokens:
            raise RuntimeError(f"asked for {len(prompts)} x {num_tokens} tokens, got {len(times)}")
        return times

    def measure_decode(self, prompt: list[int], num_tokens: int) -> None:
        times = self.token_times([prompt], num_tokens)
        events.value("decode_tok_s", (num_tokens - 1) / (times[-1] - times[0]))
        decodes = [plan for plan in self._runner.plans if plan.starts[0] >= len(prompt)]
        seconds = bare_seconds(self._built.runner, decodes)
        events.value("bare_decode_tok_s", len(decodes) / seconds)

    def measure_prefill(self, prompt: list[int]) -> None:
        events.value("prefill_tok_s", len(prompt) / self.token_times([prompt], 1)[0])
        seconds = bare_seconds(self._built.runner, self._runner.plans)
        events.value("bare_prefill_tok_s", len(prompt) / seconds)

    def measure_level(self, prompts: list[list[int]], num_tokens: int) -> None:
        level, total = len(prompts), len(prompts) * num_tokens
        begin = time.thread_time()
        times = self.token_times(prompts, num_tokens)
        host_s = time.thread_time() - begin - self._runner.thread_s
        events.value(f"concurrent_{level}_tok_s", total / times[-1])
        events.value(f"host_us_per_token_{level}", 1e6 * host_s / total)
        events.value(f"steps_{level}", len(self._runner.plans))
        useful = sum(plan.num_useful_tokens for plan in self._runner.plans)
        executed = sum(plan.num_executed_tokens for plan in self._runner.plans)
        events.value(f"useful_share_{level}", useful / executed)
        seconds = bare_seconds(self._built.runner, self._runner.plans)
        events.value(f"bare_concurrent_{level}_tok_s", total / seconds)


def main() -> None:
    config_path, workload_path = sys.argv[1:]
    config = EngineConfig(**yaml.safe_load(Path(config_path).read_text()))
    workload = json.loads(Path(workload_path).read_text())
    built = build_engine(config)
    bench = Bench(built)
    bench.token_times([workload["decode_prompt"]], 2)
    compiled = built.compile_count()
    events.ready(shapes=[str(shape) for shape in built.plan.shapes])
    for _ in range(workload["repeats"]):
        bench.measure_decode(workload["decode_prompt"], workload["decode_tokens"])
        bench.measure_prefill(workload["prefill_prompt"])
        for level in workload["levels"]:
            bench.measure_level(
                workload["concurrent_prompts"][:level], workload["concurrent_tokens"]
            )
    if built.compile_count() != compiled:
        raise RuntimeError(f"{built.compile_count() - compiled} programs were compiled in service")


if __name__ == "__main__":
    main()
