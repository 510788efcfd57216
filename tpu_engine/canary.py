"""The canary: every executable runs once on known tokens before anybody is served.

Owns what is run, how results of different shapes are compared, and what is noted down for later
starts. An executable that loads and computes something else is worse than none: programs whose
indexed writes did nothing have come out of shared caches.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from buckets.cache_store import CacheStore
from buckets.shape import StepShape
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError
from tpu_engine.step_plan import Runner, SamplingColumns, StepPlan
from tpu_engine.weights.source import TensorSource

NUM_TOKENS = 8
RECORD = "canary"
# How far log-probabilities of one token may lie apart: rounding differs between shapes. Two tokens
# may change places where both are within this of each other.
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.05}
# 8-bit weights or pages round as they like, but the same way in every shape.
_EIGHT_BIT = 0.2


class CanaryFailed(EngineError):
    """An executable computes something else than the others, or than it used to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a shape makes of the canary: the token after it, greedily, and its log-probability."""

    token_id: int
    logprob: float

    def agrees_with(self, other: Answer, tolerance: float) -> bool:
        """Equal tokens, or a near tie, with log-probabilities that differ by rounding."""
        return abs(self.logprob - other.logprob) <= tolerance

    def __str__(self) -> str:
        return f"token {self.token_id} at {self.logprob:.4f}"


@dataclass(frozen=True, slots=True)
class Canary:
    """Runs the canary through shapes.

    Attributes:
        num_token_ids: ids there are; the canary's are spread over them.
        num_pages: of the pool; each shape gets pages of its own, so that none reads what another
            one wrote.
        in_one_step: large shapes take all tokens at once: half the time where even a step of few
            tokens is slow and new keys are read back from their pages anyway (no kernels).
    """

    runner: Runner
    num_token_ids: int
    num_pages: int
    page_size: int
    in_one_step: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        return canary_tokens(self.num_token_ids)

    def answer(self, shape: StepShape, turn: int) -> Answer:
        """The canary's last token alone, after the others in chunks as large as the shape takes.

        So every shape writes pages, reads them back, computes a chunk and a decode; or all that
        in one step.
        """
        chunk = min(NUM_TOKENS - 1, shape.num_tokens)
        cuts = [*range(0, NUM_TOKENS - 1, chunk), NUM_TOKENS - 1, NUM_TOKENS]
        if self.in_one_step and shape.num_tokens >= NUM_TOKENS:
            cuts = [0, NUM_TOKENS]
        table = self._page_table(shape, turn)
        for start, end in pairwise(cuts):
            plan = self._plan(shape, table, start, end)
            result = self.runner.collect(self.runner.dispatch(plan))
        if not result.finite[0]:
            raise CanaryFailed(f"the program of ({shape}) computes infinite or undefined numbers")
        return Answer(int(result.token_ids[0]), float(result.logprobs[0]))

    def _page_table(self, shape: StepShape, turn: int) -> np.ndarray:
        needed = -(-NUM_TOKENS // self.page_size)
        table = np.zeros((1, shape.pages_per_seq), np.int32)
        first = turn * needed % max(self.num_pages - needed, 1)
        table[0, :needed] = first + 1 + np.arange(needed)
        return table

    def _plan(self, shape: StepShape, table: np.ndarray, start: int, end: int) -> StepPlan:
        def one(value: float, dtype: Any = np.int32) -> Any:
            return np.full(1, value, dtype)

        greedy = SamplingColumns(
            temperature=one(0, np.float32),
            top_k=one(0),
            top_p=one(1, np.float32),
            min_p=one(0, np.float32),
            seed=one(0, np.uint32),
        )
        return StepPlan(
            step_id=-1,
            shape=shape,
            request_ids=one(-1, np.int64),
            epochs=one(0),
            slots=one(0),
            starts=one(start),
            num_tokens=one(end - start),
            samples=one(end == NUM_TOKENS, np.bool_),
            last_on_device=one(False, np.bool_),
            token_ids=np.array(self.token_ids[start:end], np.int32),
            page_table=table,
            sampling=greedy,
        )


def canary_tokens(num_token_ids: int) -> tuple[int, ...]:
    """The known input, all over the vocabulary."""
    return tuple((i * 7919 + 13) % num_token_ids for i in range(NUM_TOKENS))


def check_shapes(
    canary: Canary,
    shapes: Iterable[StepShape],
    tolerance: float,
    report: Callable[[int, StepShape], None] = lambda done, shape: None,
) -> Answer:
    """Runs every shape and returns the answer they agree on.

    Raises `CanaryFailed` naming every shape that differs from what most of them say.
    """
    answers: dict[StepShape, Answer] = {}
    for done, shape in enumerate(shapes, start=1):
        answers[shape] = canary.answer(shape, done - 1)
        report(done, shape)
    [(token_id, _)] = Counter(answer.token_id for answer in answers.values()).most_common(1)
    said = sorted(a.logprob for a in answers.values() if a.token_id == token_id)
    agreed = Answer(token_id, said[len(said) // 2])
    wrong = {s: a for s, a in answers.items() if not a.agrees_with(agreed, tolerance)}
    if wrong:
        each = "; ".join(f"({shape}) says {answer}" for shape, answer in wrong.items())
        raise CanaryFailed(
            f"{len(wrong)} of {len(answers)} programs compute something else than the others "
            f"({agreed}): {each}. Remove their entries from the compile cache and start again"
        )
    return agreed


def tolerance_of(config: EngineConfig, platform: str) -> float:
    """How far answers may lie apart in this derived configuration."""
    if config.dtype == "float32" and platform == "tpu":
        return TOLERANCES["bfloat16"]  # its matrix unit multiplies bfloat16 by default
    is_eight_bit = config.quantize == "int8" or config.kv_dtype not in TOLERANCES
    own = TOLERANCES[config.dtype]
    return max(own, _EIGHT_BIT) if is_eight_bit else own


def compare_with_earlier(
    answer: Answer, name: str, tolerance: float, store: CacheStore | None
) -> None:
    """Compares with what the same model said at an earlier start, and notes it for later ones.

    Raises `CanaryFailed` where it differs.
    """
    known = None if store is None else store.get_record(RECORD, name)
    if store is None or known is None:
        if store is not None:
            store.put_record(RECORD, name, asdict(answer))
        return
    earlier = Answer(int(known["token_id"]), float(known["logprob"]))
    if not answer.agrees_with(earlier, tolerance):
        raise CanaryFailed(
            f"all programs say {answer}, but at an earlier start they said {earlier}, with the "
            f"same weights and options. If that is wanted, remove records/{RECORD}/{name}.json "
            f"from the compile cache"
        )


def answer_name(weights: str, options: Mapping[str, object]) -> str:
    """Under which name an answer is noted: it depends on weights and numeric options alone."""
    text = json.dumps([weights, dict(options), NUM_TOKENS], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_fingerprint(source: TensorSource) -> str:
    """Digest of a checkpoint's names, shapes, types and of one row of each tensor.

    A few megabytes are read of any model. Two checkpoints that differ in none of these rows count
    as the same.
    """
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        shape = source.shape(name)
        digest.update(f"{name} {shape} {source.dtype(name)}".encode())
        middle = shape[0] // 2
        digest.update(source.read(name, (slice(middle, middle + 1),)).tobytes())
    return digest.hexdigest()
