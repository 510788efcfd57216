"""How long a step of each shape takes on this device, filled to the brim.

Owns the full plans that are timed and the medians. Requests, text and the scheduler play no part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from buckets.shape import StepShape
from tpu_engine.step_plan import Runner, SamplingColumns, StepPlan

NUM_WARM_UP = 2  # first runs touch memory for the first time


def full_plan(shape: StepShape, num_pages: int, page_size: int) -> StepPlan:
    """A greedy step with every row and, as far as the page table goes, every token in use.

    All rows write the same pages: what they compute means nothing.
    """
    rows = shape.num_seqs
    most = shape.pages_per_seq * page_size
    each, rest = divmod(shape.num_tokens, rows)
    counts = np.full(rows, min(each, most), np.int32)
    counts[-1] = min(each + rest, most)
    pages = 1 + np.arange(shape.pages_per_seq, dtype=np.int32) % max(num_pages - 1, 1)
    return StepPlan(
        step_id=-1,
        shape=shape,
        request_ids=np.arange(rows, dtype=np.int64),
        epochs=np.zeros(rows, np.int32),
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        num_tokens=counts,
        samples=np.ones(rows, np.bool_),
        last_on_device=np.zeros(rows, np.bool_),
        token_ids=np.ones(int(counts.sum()), np.int32),
        page_table=np.tile(pages, (rows, 1)),
        sampling=SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint32),
        ),
    )


def median_step_s(
    runner: Runner,
    plan: StepPlan,
    num_runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds from dispatch to the tokens read back, median of `num_runs`."""
    seconds: list[float] = []
    for _ in range(NUM_WARM_UP + num_runs):
        started_s = clock()
        runner.collect(runner.dispatch(plan))
        seconds.append(clock() - started_s)
    return statistics.median(seconds[NUM_WARM_UP:])
