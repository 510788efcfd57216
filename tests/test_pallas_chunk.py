"""The chunk kernel against the float64 oracle, in the Pallas interpreter.

Races, reads out of bounds and uninitialised memory are looked for; slots nobody owns hold NaN.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.pallas.chunk import chunk_attention
from kernels.attention.pallas.chunk_blocks import ChunkBlocks
from kernels.attention.pallas.chunk_work import chunk_work
from kernels.attention.pallas.tables import LayerData, step_tables
from tests.attention_cases import Case, assert_correct, make_case, oracle

# q_tokens, kv_block, kv_slots, band_heads, step_bands
SMALL = ChunkBlocks(64, 64, 2, 2, 1)
WIDE = ChunkBlocks(128, 32, 3, 1, 2)

QUICK: dict[str, tuple[ChunkBlocks, dict[str, Any]]] = {
    "whole prompt": (SMALL, dict(rows=[(0, 130)], heads=(2, 1, 128))),
    "mixed, bf16": (
        WIDE,
        dict(
            rows=[(5, 1), (37, 100), (16, 3), (0, 2), (3, 17)],
            heads=(4, 2, 128),
            page_size=32,
            q_dtype="bfloat16",
            kv_dtype="bfloat16",
        ),
    ),
    "window, sinks and soft cap": (
        SMALL,
        dict(
            rows=[(150, 70), (200, 9)],
            heads=(2, 1, 128),
            window=40,
            sinks=True,
            soft_cap=2.0,
            gain=3.0,
        ),
    ),
    "int8": (
        SMALL,
        dict(
            rows=[(21, 70), (64, 33)],
            heads=(4, 2, 128),
            page_size=32,
            q_dtype="bfloat16",
            kv_dtype="int8",
        ),
    ),
}


def attend(case: Case, blocks: ChunkBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernel; rows of the decode call are filled in from the oracle."""
    geometry, most = case.geometry(), case.spec.decode_queries
    tables = step_tables(*map(jnp.asarray, case.tables()), decode_queries=most)
    work = chunk_work(tables, num_tokens=case.q.shape[0], geometry=geometry, blocks=blocks)
    optional = [case.window(), case.sinks, case.tree]
    given = [None if each is None else jnp.asarray(each) for each in optional]
    out, cache = chunk_attention(
        jnp.asarray(case.q),
        jnp.asarray(case.k_new),
        None if case.v_new is None else jnp.asarray(case.v_new),
        jnp.asarray(case.cache),
        work,
        LayerData(jnp.int32(case.layer), *given),
        geometry=geometry,
        scoring=case.scoring(),
        blocks=blocks,
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )
    return _with_decodes(case, np.array(out), np.array(cache))


def _with_decodes(case: Case, out: np.ndarray, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    expected, page_size = oracle(case), case.spec.page_size
    for row in range(case.num_seqs):
        first, last = case.cu_q_lens[row], case.cu_q_lens[row + 1]
        if last - first <= case.spec.decode_queries:
            out[first:last] = expected.out[first:last]
            for position in range(case.kv_lens[row] - (last - first), case.kv_lens[row]):
                page = case.page_table[row, position // page_size]
                slot = (case.layer, page, slice(None), slice(None), position % page_size)
                untouched, before = (a[slot].astype(float) for a in (cache, case.cache))
                np.testing.assert_array_equal(untouched, before)
                cache[slot] = expected.cache[slot]
    return out, cache


def check(blocks: ChunkBlocks, **spec: Any) -> None:
    case = make_case(stored=True, **spec)
    out, cache = attend(case, blocks)
    assert_correct(case, out, cache, padding_is_zero=False)


@pytest.mark.parametrize("name", QUICK)
def test_matches_oracle(name: str) -> None:
    blocks, spec = QUICK[name]
    check(blocks, **spec)
