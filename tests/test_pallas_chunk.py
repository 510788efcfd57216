"""The chunk kernel against the float64 oracle, in the Pallas interpreter.

Races, reads out of bounds and uninitialised memory are looked for; slots nobody owns hold NaN.
Owns also the list of faults that these tests must notice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import chunk, chunk_copies, chunk_step
from kernels.attention.pallas.chunk import chunk_attention
from kernels.attention.pallas.chunk_blocks import (
    ChunkBlocks,
    candidate_blocks,
    check_blocks,
    vmem_limit,
)
from kernels.attention.pallas.chunk_work import ChunkWork, block_at, chunk_work, item_at
from kernels.attention.pallas.tables import LayerData, step_tables
from kernels.chips import CHIPS, Chip
from tests.attention_cases import Case, assert_correct, make_case, oracle

# Interpreted kernels take long where cores are shared.
pytestmark = pytest.mark.timeout(600)

# Interpreted code is not worth optimising: it runs once.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# q_tokens, kv_block, kv_slots, band_heads, step_bands
SMALL = ChunkBlocks(32, 32, 2, 4, 1)
SQUARE = ChunkBlocks(64, 64, 3, 2, 1)
FLAT = ChunkBlocks(128, 32, 2, 1, 2)

BF16 = dict(q_dtype="bfloat16", kv_dtype="bfloat16")
# Everything at once, in few steps; the last row's tile holds the row before as well.
ALL = dict(
    rows=[(5, 1), (45, 40), (3, 9)],
    heads=(4, 1, 128),
    window=20,
    sinks=True,
    soft_cap=2.0,
    gain=3.0,
)

QUICK: dict[str, tuple[ChunkBlocks, dict[str, Any]]] = {
    "everything at once": (SMALL, ALL),
    "two KV heads, two steps a block": (
        SQUARE,
        dict(rows=[(37, 70), (0, 1), (16, 2)], heads=(4, 2, 128), **BF16),
    ),
    "int8": (
        SMALL,
        dict(rows=[(33, 35)], heads=(4, 1, 128), page_size=32, q_dtype="bfloat16", kv_dtype="int8"),
    ),
    "latent": (
        SMALL,
        dict(rows=[(21, 35)], heads=(8, 1, 256), value_width=128, **BF16),
    ),
}

LONG: dict[str, tuple[ChunkBlocks, dict[str, Any]]] = {
    "whole prompts": (SQUARE, dict(rows=[(0, 130), (0, 64), (0, 63)], heads=(2, 1, 128))),
    "borders of pages and blocks": (
        SQUARE,
        dict(rows=[(63, 65), (64, 64), (65, 63), (15, 17), (16, 16)], heads=(2, 1, 128)),
    ),
    "more rows than a block": (
        FLAT,
        dict(rows=[(7 * i, 2 + i % 5) for i in range(9)], heads=(4, 2, 128), page_size=32),
    ),
    "window of one": (SMALL, dict(rows=[(70, 40)], heads=(4, 1, 128), window=1)),
    "window of all": (SMALL, dict(rows=[(33, 20)], heads=(4, 1, 128), window=0)),
    "window at block borders": (
        SMALL,
        dict(rows=[(100, 70), (64, 33)], heads=(4, 1, 128), window=32),
    ),
    "fp8": (
        SQUARE,
        dict(
            rows=[(21, 70), (64, 33)],
            heads=(4, 2, 128),
            page_size=32,
            window=30,
            q_dtype="bfloat16",
            kv_dtype="float8_e4m3fn",
        ),
    ),
    "three heads, width 256": (
        ChunkBlocks(128, 64, 2, 3, 1),
        dict(rows=[(5, 37), (16, 2)], heads=(3, 1, 256)),
    ),
    "seven heads": (ChunkBlocks(128, 32, 2, 7, 1), dict(rows=[(20, 30)], heads=(14, 2, 128))),
    "pages wider than blocks": (
        SQUARE,
        dict(rows=[(300, 70)], heads=(2, 1, 128), page_size=256, **BF16),
    ),
    "tile of the border read last": (SMALL, dict(rows=[(101, 40)], heads=(4, 1, 128))),
    "shared prefix": (
        SQUARE,
        dict(rows=[(70, 40), (64, 33)], heads=(2, 1, 128), shared_pages=4),
    ),
    "decodes alone": (SQUARE, dict(rows=[(70, 1), (64, 1)], heads=(2, 1, 128))),
    "rows up to eight go to the other call": (
        SQUARE,
        dict(rows=[(70, 8), (64, 9), (3, 7)], heads=(2, 1, 128), decode_queries=8, tree=True),
    ),
}


def attend(case: Case, blocks: ChunkBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernel; rows of the decode call are filled in from the oracle."""
    geometry, most = case.geometry(), case.spec.decode_queries
    tables = step_tables(*map(jnp.asarray, case.tables()), decode_queries=most)
    work = chunk_work(tables, num_tokens=case.q.shape[0], geometry=geometry, blocks=blocks)
    optional = [case.window(), case.sinks, case.tree]
    given = [None if each is None else jnp.asarray(each) for each in optional]
    attention = partial(
        chunk_attention,
        geometry=geometry,
        scoring=case.scoring(),
        blocks=blocks,
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )
    out, cache = jax.jit(attention, compiler_options=FAST_COMPILE)(
        jnp.asarray(case.q),
        jnp.asarray(case.k_new),
        None if case.v_new is None else jnp.asarray(case.v_new),
        jnp.asarray(case.cache),
        work,
        LayerData(jnp.int32(case.layer), *given),
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


def check(blocks: ChunkBlocks, capfd: pytest.CaptureFixture[str], **spec: Any) -> None:
    case = make_case(stored=True, **spec)
    out, cache = attend(case, blocks)
    assert "RACE" not in capfd.readouterr().out  # older JAX only prints races
    assert_correct(case, out, cache, padding_is_zero=False)


@pytest.mark.parametrize("name", QUICK)
def test_matches_oracle(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    blocks, spec = QUICK[name]
    check(blocks, capfd, **spec)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_matches_oracle_long(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    blocks, spec = LONG[name]
    check(blocks, capfd, **spec)


# --- faults ----------------------------------------------------------------------------------


def keep_clean_rows(mem: Any, slot: Any) -> None:
    """Forgets to clear values that a weight of zero meets."""


def wider_window(mem: Any, slot: Any) -> None:
    chunk_step_mark_seen(replace(mem, window=mem.window + 1), slot)


def later_tokens(mem: Any, slot: Any) -> None:
    mem.ring[slot, chunk_copies.OWN_ROW] += 1
    chunk_step_mark_seen(mem, slot)


def no_wait(mem: Any, slot: Any) -> None:
    """Forgets to wait for a block."""


def other_slot(mem: Any, group: Any, nth: int, slot: Any) -> Any:
    return chunk_step_values_of(mem, group, nth, 1 - slot)


def other_queries(mem: Any, before: Any, now: Any, parity: Any) -> None:
    chunk_step_step(mem, before, now, 1 - parity)


def carried_over(mem: Any, band: Any, parity: Any) -> None:
    """Leaves maxima and sums in place for the next item."""
    kept = {name: mem.vmem[name][band] for name in ("acc", "top")}
    chunk_step_finish(mem, band, parity)
    for name, value in kept.items():
        mem.vmem[name][band] = value


def no_cap(mem: Any, *where: Any) -> Any:
    return chunk_step_score(replace(mem, scoring=replace(mem.scoring, soft_cap=None)), *where)


def no_sinks(mem: Any, band: Any, parity: Any) -> None:
    chunk_step_finish(replace(mem, sinks=None), band, parity)


def no_neighbour(*_: Any) -> None:
    """Overwrites the rows that the item before wrote in a shared tile."""


def turned_too_far(rows: Any, by: Any, tile: int) -> Any:
    return chunk_copies_turn(rows, by + 1, tile)


def no_tail(mem: Any, slot: Any, act: Any) -> None:
    """Forgets the tiles of a page that is partly filled, and to wait for them."""


chunk_step_mark_seen, chunk_step_values_of = chunk_step.mark_seen, chunk_step.values_of
chunk_step_step, chunk_step_finish = chunk_step.step, chunk_step.finish
chunk_step_score, chunk_copies_turn = chunk_step.score, chunk_copies._turn

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "values are not masked": (chunk_step, "clear_rows", keep_clean_rows),
    "window is one too wide": (chunk_step, "mark_seen", wider_window),
    "tokens see the next one": (chunk_step, "mark_seen", later_tokens),
    "a block is not waited for": (chunk_copies, "wait_for_block", no_wait),
    "values of another slot": (chunk_step, "values_of", other_slot),
    "queries of another item": (chunk_step, "step", other_queries),
    "maximum and sums carried over": (chunk_step, "finish", carried_over),
    "soft cap forgotten": (chunk_step, "score", no_cap),
    "sinks forgotten": (chunk_step, "finish", no_sinks),
    "neighbour's rows overwritten": (chunk, "_keep_neighbour", no_neighbour),
    "new rows turned too far": (chunk_copies, "_turn", turned_too_far),
    "tail of a page not fetched": (chunk_copies, "_tail_copies", no_tail),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module, function, fault = FAULTS[name]
    monkeypatch.setattr(module, function, fault)
    with pytest.raises(Exception) as noticed:  # noqa: PT011 - a race or a wrong value
        check(SMALL, capfd, **ALL)
    assert isinstance(noticed.value, AssertionError) or "race" in str(noticed.value).lower()


# --- the work list -----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 500])
def test_blocks_cover_what_is_seen_and_no_more(window: int) -> None:
    rows = [(0, 70), (5, 1), (33, 31), (64, 2), (100, 129), (1, 15)]
    case = make_case(rows, num_tokens=300, num_rows=8, page_size=16, stored=True)
    geometry = case.geometry()
    tables = step_tables(*map(jnp.asarray, case.tables()), decode_queries=1)
    work = chunk_work(tables, num_tokens=300, geometry=geometry, blocks=SQUARE)
    taken: list[int] = []
    for index in range(int(work.num_items)):
        item, blocks = _item(work, index, window)
        tokens = np.arange(max(item.q_start, item.first), item.q_end)
        taken += tokens.tolist()
        before, q_len = rows[int(item.seq)]
        own = before + tokens - case.cu_q_lens[item.seq]
        first = np.maximum(own - window + 1, 0) if window else np.zeros_like(own)
        covered: list[int] = []
        for block in blocks:
            places = np.arange(block.low, block.high) + block.position
            assert len(places) > 0
            assert (block.position % SQUARE.kv_block == 0) or block.is_new
            assert (places >= before).all() if block.is_new else (places < before).all()
            seen = (places <= own[:, None]) & (places >= first[:, None])
            whole = len(places) == SQUARE.kv_block and bool(seen.all())
            assert bool(block.masked) == (not whole)
            covered += places.tolist()
        assert covered == list(range(first.min(), covered[-1] + 1))
        assert own.max() <= covered[-1] < before + q_len
    expected = [
        t
        for row, (_, q_len) in enumerate(rows)
        if q_len > 1
        for t in range(case.cu_q_lens[row], case.cu_q_lens[row + 1])
    ]
    assert taken == expected


@pytest.mark.parametrize("length", [32_767, 32_768, 32_769, 1_048_575, 1_048_576, 1_048_577])
def test_positions_are_exact_at_a_million(length: int) -> None:
    """Nothing is allocated: the index arithmetic alone, against Python's integers."""
    q_len, window = 100, 70_000
    arrays = dict(item_seqs=[0, 0], item_blocks=[0, 1], cu_q_lens=[3, 3 + q_len], kv_lens=[length])
    empty = jnp.zeros(1, jnp.int32)
    work = ChunkWork(
        **{name: jnp.array(value, jnp.int32) for name, value in arrays.items()},
        num_items=jnp.int32(2),
        first_pages=empty,
        last_pages=empty,
        page_ids=empty,
    )
    start = length - q_len
    for index, first_token in enumerate([3, 64]):
        for seen_back in (0, window):
            item, blocks = _item(work, index, seen_back)
            lowest = max(start + first_token - 3 - seen_back + 1, 0) if seen_back else 0
            assert (int(item.lowest), int(item.start)) == (lowest, start)
            assert blocks[0].position + blocks[0].low == lowest
            last = blocks[-1].position + blocks[-1].high - 1
            own = start + min(64 * (index + 1), 3 + q_len) - 1 - 3
            assert own <= last < length
            assert len(blocks) <= (length - lowest) // SQUARE.kv_block + 3


def _item(work: ChunkWork, index: int, window: int) -> tuple[Any, list[Any]]:
    sizes = dict(tile=16, kv_block=SQUARE.kv_block)
    item = item_at(index, work, np.int32(window), q_tokens=SQUARE.q_tokens, **sizes)
    if int(item.num_blocks) > 8:  # the first and the last ones say enough
        order = [0, 1, int(item.num_blocks) - 2, int(item.num_blocks) - 1]
    else:
        order = range(int(item.num_blocks))
    blocks = [block_at(item, np.int32(nth), np.int32(window), **sizes) for nth in order]
    return type(item)(*map(int, item)), [type(b)(*map(int, b)) for b in blocks]


# --- block sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (8, 2, 128), (16, 8, 256), (4, 1, 256), (9, 3, 128)]
)
def test_default_blocks_fit(chip: Chip, heads: tuple[int, int, int]) -> None:
    n, k, h = heads
    geometry, scoring = Geometry(n, k, h, h, 16), Scoring(h**-0.5)
    for blocks in candidate_blocks(geometry, scoring, chip):
        check_blocks(geometry, scoring, blocks, chip)
        assert vmem_limit(geometry, scoring, blocks) <= chip.vmem_bytes


def test_blocks_that_do_not_fit_are_refused_with_some_that_do() -> None:
    geometry, scoring = Geometry(32, 8, 128, 128, 16), Scoring(1.0)
    huge = ChunkBlocks(256, 1024, 4, 4, 4)
    with pytest.raises(ValueError, match=r"need \d+ bytes of VMEM, \d+ too many; these fit v4: "):
        check_blocks(geometry, scoring, huge, CHIPS["v4"])
    for change, what in [
        (dict(q_tokens=96), "q_tokens must be a power of two"),
        (dict(band_heads=3), "must divide N/K"),
        (dict(step_bands=3), "step_bands must divide"),
        (dict(kv_slots=1), "kv_slots must be at least 2"),
    ]:
        with pytest.raises(ValueError, match=what):
            check_blocks(geometry, scoring, replace(huge, **change), CHIPS["v6e"])
