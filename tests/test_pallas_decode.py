"""The decode kernel in interpret mode, with race, bounds and uninitialised-memory checks on.

Every case has NaN in all slots nobody owns; see `attention_cases`. A configuration compiles once
(seconds), so a test packs many rows into one case. The full matrix is marked `long`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import decode
from kernels.attention.pallas.decode import DecodeBlocks
from kernels.attention.pallas.tables import LayerData, step_tables
from kernels.chips import CHIPS, Chip
from tests.attention_cases import Case, assert_correct, make_case
from tests.attention_catalogue import Rows, decodes, verifies

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# Interpreted code is not worth optimising: it runs once.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SMALL = DecodeBlocks(block_tokens=32, num_slots=6)


@partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=FAST_COMPILE)
def _run(geometry: Geometry, scoring: Scoring, blocks: DecodeBlocks, *arrays: Any) -> Any:
    q, k_new, v_new, cache, data, tables = arrays
    step = step_tables(*tables, decode_queries=blocks.decode_queries)
    work = decode.decode_work(step, num_tokens=q.shape[0], decode_queries=blocks.decode_queries)
    rows, cache = decode.decode_attention(
        q, k_new, v_new, cache, work, data,
        geometry=geometry, scoring=scoring, blocks=blocks, interpret=INTERPRET,
    )  # fmt: skip
    return rows, cache, step.decode_seqs, step.num_decodes


def run(case: Case, blocks: DecodeBlocks) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's outputs in the step's token order (zeros where it has none), and the cache."""
    geometry = case.geometry()
    options = (case.window(), case.sinks, case.tree)
    given = (None if x is None else jnp.asarray(x) for x in options)
    data = LayerData(jnp.asarray(case.layer), *given)
    arrays = (case.q, case.k_new, case.v_new, case.cache, data, case.tables())
    rows, cache, seqs, count = _run(geometry, case.scoring(), blocks, *arrays)
    rows, new = np.asarray(rows), blocks.decode_queries
    out = np.zeros((*case.q.shape[:2], geometry.value_width), case.q.dtype)
    for i, seq in enumerate(np.asarray(seqs)[: int(count)]):
        first, last = case.cu_q_lens[seq], case.cu_q_lens[seq + 1]
        out[first:last] = rows[i * new : i * new + last - first]
    return out, np.asarray(cache)


def check(rows: Rows, blocks: DecodeBlocks, **spec: Any) -> None:
    case = make_case(rows, stored=True, **spec)
    out, cache = run(case, blocks)
    assert_correct(case, out, cache)


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Any:
    """Older JAX only prints races."""
    yield
    assert "RACE" not in capfd.readouterr().out


def test_decodes_at_every_border() -> None:
    """Lengths around pages and blocks; window, sinks and soft cap on; two heads share a tile."""
    blocks = DecodeBlocks(block_tokens=32, num_slots=6, heads_per_tile=2)
    rows = decodes(16, 32, 64, 96)
    check(rows, blocks, heads=(4, 2, 128), window=20, sinks=True, soft_cap=3.0)


@pytest.mark.long
@pytest.mark.parametrize("heads", [(2, 1, 128), (9, 3, 128), (5, 1, 256), (16, 1, 128)])
def test_decodes_without_options(heads: tuple[int, int, int]) -> None:
    check(decodes(16, 32, 64, 96), SMALL, heads=heads)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 20])
def test_verify_rows_with_trees(window: int | None) -> None:
    blocks = DecodeBlocks(block_tokens=32, num_slots=6, heads_per_tile=2, decode_queries=4)
    rows = verifies(16, 32, 64, longest=4)
    check(rows, blocks, heads=(4, 2, 128), tree=True, decode_queries=4, window=window)


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_narrow_caches(kv_dtype: str) -> None:
    blocks = DecodeBlocks(block_tokens=64, num_slots=6, items_per_step=2)
    spec = dict(q_dtype="bfloat16", kv_dtype=kv_dtype, page_size=32, heads=(4, 2, 128))
    check(decodes(32, 64, 128), blocks, **spec)


@pytest.mark.long
def test_latent_caches() -> None:
    check(decodes(16, 32, 64), SMALL, heads=(5, 1, 256), value_width=128)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_default_blocks_fit_every_chip(chip: Chip) -> None:
    for heads in ((32, 8, 128), (8, 2, 128), (16, 8, 256), (4, 1, 256)):
        geometry = Geometry(*heads, heads[2], 16)
        blocks = decode.default_blocks(geometry, Scoring(1.0), chip)
        decode.check_blocks(geometry, Scoring(1.0), blocks, chip)


def test_blocks_that_do_not_fit_are_refused_with_a_choice_that_fits() -> None:
    geometry, chip = Geometry(32, 8, 128, 128, 128), CHIPS["v4"]
    with pytest.raises(ValueError, match=r"more than v4 has; a choice that fits: DecodeBlocks\("):
        decode.check_blocks(geometry, Scoring(1.0), DecodeBlocks(2048, 8), chip)
