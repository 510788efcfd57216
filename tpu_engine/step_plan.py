"""What the scheduler hands to the model runner, and what it gets back: plain NumPy snapshots.

Owns the types of the scheduler-runner contract. A `StepPlan` is immutable: its arrays are copies
(or memory nobody writes while the plan is in flight). Knows no JAX and no request objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from buckets.cost import Work
from buckets.shape import StepShape

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Sampling options of the rows of a step, one value per row (`B` rows).

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are neutral; `seed` is the
    request's seed modulo 2**32.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: `B` rows, `sum(num_tokens)` useful tokens, executed at `shape`.

    Row i computes tokens `starts[i] .. starts[i] + num_tokens[i]` of request `request_ids[i]`.
    Its tokens lie packed in `token_ids` (rows in order). Where `last_on_device[i]`, the row's
    last token is not known to the host yet: its place in `token_ids` is 0 and the program reads
    it from the device-resident last-token buffer at `slots[i]`. Where `samples[i]`, the logits
    of the row's last token are sampled and the result is written to that buffer at `slots[i]`.
    `page_table[i]` lists the pages of positions `0 ..`, padded with the null page 0.
    """

    step_id: int
    shape: StepShape
    request_ids: Int64
    epochs: Int32
    slots: Int32
    starts: Int32
    num_tokens: Int32
    samples: Bool
    last_on_device: Bool
    token_ids: Int32
    page_table: Int32
    sampling: SamplingColumns

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def num_useful_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_executed_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def work(self) -> Work:
        """What the cost model must know beside the shape: KV positions read, query-key pairs."""
        starts, counts = self.starts.astype(np.int64), self.num_tokens.astype(np.int64)
        pairs = counts * starts + counts * (counts + 1) // 2
        return Work(float((starts + counts).sum()), float(pairs.sum()))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields `(request, epoch, start, num_tokens)` per row, for auditors and records."""
        columns = (self.request_ids, self.epochs, self.starts, self.num_tokens)
        yield from zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step produced, row by row in the plan's order (`B` rows).

    `token_ids` is meaningful where the row sampled; `logprobs` is the log-probability of that
    token under the model's unmodified distribution; `finite` is False where the row's logits
    held NaN or infinity (that row ends, the others go on).
    """

    step_id: int
    token_ids: Int32
    logprobs: Float32
    finite: Bool


class InFlight(Protocol):
    """A dispatched step that was not collected yet."""

    @property
    def plan(self) -> StepPlan: ...


class Runner(Protocol):
    """Executes plans. Steps are collected in the order in which they were dispatched."""

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts the step and returns at once; raises `CompileMiss` for an unknown shape."""
        ...

    def collect(self, handle: InFlight) -> StepResult:
        """Waits for the step's sampled tokens; raises `DeviceFault` when the device failed."""
        ...
