"""The requests every engine is measured with, as plain data that travels as JSON.

Owns prompts, lengths and repeat counts. Knows no engine: drivers of peers read the JSON with the
standard library alone.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

# Token ids are drawn from this range: inside every vocabulary here, past the special tokens.
_FIRST_ID, _LAST_ID = 1000, 30000


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy requests given as token ids; EOS is ignored, so every engine does the same work.

    Attributes:
        decode_prompt: prompt of the single stream whose decode rate is measured.
        decode_tokens: tokens it generates.
        prefill_prompt: prompt whose time to first token gives the prefill rate.
        concurrent_prompts: one prompt per concurrent stream, as many as the largest level.
        concurrent_tokens: tokens each concurrent stream generates.
        levels: numbers of concurrent streams.
        repeats: measurements per start of an engine.
    """

    decode_prompt: list[int]
    decode_tokens: int
    prefill_prompt: list[int]
    concurrent_prompts: list[list[int]]
    concurrent_tokens: int
    levels: list[int]
    repeats: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def cpu_workload(repeats: int, *, seed: int = 0) -> Workload:
    """The workload of `benchmarks.cpu_serving`; `seed` chooses the token ids."""
    source = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [source.randint(_FIRST_ID, _LAST_ID) for _ in range(count)]

    return Workload(
        decode_prompt=ids(16),
        decode_tokens=128,
        prefill_prompt=ids(512),
        concurrent_prompts=[ids(32) for _ in range(32)],
        concurrent_tokens=64,
        levels=[8, 32],
        repeats=repeats,
    )
