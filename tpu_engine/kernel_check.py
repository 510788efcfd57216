"""Runs the device ops an engine has chosen against their references, on this device.

Owns the small cases and the comparison. Each case holds chunks and decodes of several rows; the
random pages start with garbage nobody may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels.sampling
from kernels.attention import Backend, ragged_paged_attention
from kernels.sampling import sampling_cutoffs
from tpu_engine.target import StepTarget

# (positions before the step, new tokens) of each row.
_CASES = {
    "decode": ((37, 1), (5, 1), (64, 1), (1, 1)),
    "chunk": ((0, 24), (17, 9)),
    "mixed": ((0, 13), (40, 1), (20, 7), (63, 1)),
}
# Largest difference, relative to the largest value of the reference: the unit of an op is a mean
# of values of order 1. TPUs multiply float32 as bfloat16 unless told otherwise.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
_TOKENS, _ROWS = 32, 4


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One op at one case: how far it was from its reference, and how far it may be."""

    name: str
    difference: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return bool(self.difference <= self.tolerance)  # NaN is not


def check_kernels(target: StepTarget) -> Iterator[KernelResult]:
    """Compares attention and sampling of `target`, one device's share, with their references."""
    for name, rows in _CASES.items():
        yield _attention(target, name, rows)
    yield _sampling(target)


def _attention(target: StepTarget, name: str, rows: tuple[tuple[int, int], ...]) -> KernelResult:
    choice, model = target.choice, target.model
    num_shards = target.mesh.size
    layout = choice.layout.per_shard(num_shards)
    arrays, tables, num_pages = _batch(target, rows)
    dtype = jnp.dtype(target.config.dtype)
    heads = (model.num_heads // num_shards, model.num_kv_heads // num_shards)
    rng = np.random.default_rng(len(rows))

    def random(num_heads: int) -> Any:
        values = rng.normal(size=(_TOKENS, num_heads, model.head_dim))
        return jnp.asarray(values, dtype)

    q, k, v = random(heads[0]), random(heads[1]), random(heads[1])
    shape = layout.shape(2, num_pages)
    cache = jnp.asarray(rng.normal(size=shape), jnp.float32).astype(layout.dtype)

    def run(backend: Backend) -> np.ndarray:
        op = partial(ragged_paged_attention, layout=layout, backend=backend)
        plan = choice.plan if backend == choice.attention else None
        out, _ = jax.jit(partial(op, kernels=plan))(q, k, v, cache, jnp.int32(1), *tables)
        return np.asarray(out, np.float32)[: arrays["used"]]

    found, expected = run(choice.attention), run("reference")
    on_tpu = target.devices[0].platform == "tpu"
    tolerance = _TOLERANCE["bfloat16" if on_tpu else str(dtype)]
    difference = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
    return KernelResult(f"attention ({choice.attention}), {name}", difference, tolerance)


def _batch(
    target: StepTarget, rows: tuple[tuple[int, int], ...]
) -> tuple[dict[str, int], tuple[Any, ...], int]:
    """Page table, lengths and offsets of the rows; page 0 is nobody's."""
    page_size = target.config.page_size
    width = max(-(-(before + new) // page_size) for before, new in rows)
    table = np.zeros((_ROWS, width), np.int32)
    lens, ends, next_page = np.zeros(_ROWS, np.int32), [0], 1
    for row, (before, new) in enumerate(rows):
        count = -(-(before + new) // page_size)
        table[row, :count] = np.arange(next_page, next_page + count)
        next_page += count
        lens[row] = before + new
        ends.append(ends[-1] + new)
    offsets = np.array(ends + [ends[-1]] * (_ROWS + 1 - len(ends)), np.int32)
    tables = (jnp.asarray(table), jnp.asarray(lens), jnp.asarray(offsets), jnp.int32(len(rows)))
    return {"used": ends[-1]}, tables, next_page


def _sampling(target: StepTarget) -> KernelResult:
    """The difference is the share of rows that keep other tokens than the reference keeps."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(scale=4, size=(8, target.num_token_ids)), jnp.float32)
    top_k = jnp.asarray([0, 1, 5, 40, 7, 0, 3, 0], jnp.int32)
    top_p = jnp.asarray([1.0, 1.0, 1.0, 0.5, 1.0, 0.9, 1.0, 0.1], jnp.float32)

    def kept(backend: kernels.sampling.Backend) -> np.ndarray:
        cutoffs = jax.jit(partial(sampling_cutoffs, backend=backend))(logits, top_k, top_p)
        return np.asarray((logits >= cutoffs[:, None]).sum(axis=1))

    backend = target.choice.sampling
    wrong = float(np.mean(kept(backend) != kept("reference")))
    return KernelResult(f"sampling cut-offs ({backend})", wrong, 0.0)
