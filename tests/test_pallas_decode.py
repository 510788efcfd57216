"""The decode kernel in interpret mode, with race, bounds and uninitialised-memory checks on.

Every case has NaN in all slots nobody owns; see `attention_cases`. A configuration compiles once
(seconds), so a test packs many rows into one case. The full matrix is marked `long`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import decode
from kernels.attention.pallas import decode_stages as stages
from kernels.attention.pallas.decode import DecodeBlocks
from kernels.attention.pallas.decode_blocks import DecodeShape
from kernels.attention.pallas.tables import LayerData, step_tables
from kernels.chips import CHIPS, Chip
from tests.attention_cases import Case, assert_correct, make_case
from tests.attention_catalogue import Rows, decodes, verifies

# Interpreted kernels take long where cores are shared.
pytestmark = pytest.mark.timeout(600)

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


# --- the kernel broken on purpose --------------------------------------------------------------

BORDERS = decodes(16, 32, 64, 96)
BROKEN_BLOCKS = DecodeBlocks(block_tokens=32, num_slots=6, heads_per_tile=2)
BROKEN_SPEC: dict[str, Any] = dict(heads=(4, 2, 128), window=20, sinks=True, soft_cap=3.0)


def _unmasked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ones = lambda shape, item: jnp.int32(-1)  # noqa: E731
    monkeypatch.setattr(stages, "_owned_words", all_ones)


def _unmasked_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_visible", lambda *_: True)


def _window_one_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode._Kernel._first_seen
    wrong = lambda *given: jnp.maximum(right(*given) - 1, 0)  # noqa: E731
    monkeypatch.setattr(decode._Kernel, "_first_seen", wrong)


def _page_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode._Kernel._wait_pending

    def one_less(self: Any, kind: int, step: int) -> None:
        if kind != decode.FETCHED:
            return right(self, kind, step)
        index = kind * self.slots + self._ring(step)
        self.own.pending[index] = jnp.maximum(self.own.pending[index] - 1, 0)
        return right(self, kind, step)

    monkeypatch.setattr(decode._Kernel, "_wait_pending", one_less)


def _buffers_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode._Kernel._stage
    monkeypatch.setattr(decode._Kernel, "_stage", lambda self, n, slot: right(self, n // 2, slot))


def _state_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row but the first starts from the maximum and denominator of the row before it."""
    right, select = stages.accumulate, jnp.where

    def carried(shape: Any, item: Any, *rest: Any) -> None:
        zeros = itertools.count()  # per tile the denominator is reset first, then the output

        def where(when: Any, a: Any, b: Any) -> Any:
            denominator = isinstance(a, float) and a == 0.0 and next(zeros) % 2 == 0
            return select(
                when & (item.seq == 0) if a is stages.BEFORE or denominator else when, a, b
            )

        with monkeypatch.context() as inside:
            inside.setattr(stages.jnp, "where", where)
            right(shape, item, *rest)

    monkeypatch.setattr(stages, "accumulate", carried)


def _soft_cap_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    uncapped = lambda shape, scores: scores * shape.scoring.scale * stages.LOG2_E  # noqa: E731
    monkeypatch.setattr(stages, "_scaled", uncapped)


def _scale_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages._scaled
    unscaled = lambda shape, scores: right(shape, scores / shape.scoring.scale)  # noqa: E731
    monkeypatch.setattr(stages, "_scaled", unscaled)


def _sinks_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages.accumulate
    without = lambda shape, item, kv, stage, run, sinks, out: right(  # noqa: E731
        shape, item, kv, stage, run, jnp.full(sinks.shape, -1e30), out
    )
    monkeypatch.setattr(stages, "accumulate", without)


def _write_one_row_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages.write_tile
    early = lambda shape, kv, new, item, *rest: right(  # noqa: E731
        shape, kv, new, item._replace(new=jnp.where(item.new > 0, item.new - 1, item.new)), *rest
    )
    monkeypatch.setattr(stages, "write_tile", early)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault",
    [
        _unmasked_values,
        _unmasked_scores,
        _window_one_longer,
        _page_not_waited_for,
        _buffers_swapped,
        _state_carried_over,
        _soft_cap_forgotten,
        _scale_forgotten,
        _sinks_forgotten,
        _write_one_row_early,
    ],
)
def test_a_fault_in_the_kernel_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fault(monkeypatch)
    jax.clear_caches()
    case = make_case(BORDERS, stored=True, **BROKEN_SPEC)
    try:
        out, cache = run(case, BROKEN_BLOCKS)
        raced = "RACE" in capfd.readouterr().out
    except jax.errors.JaxRuntimeError:  # newer JAX raises on a race
        raced = True
    finally:
        jax.clear_caches()
    if not raced:
        with pytest.raises(AssertionError):
            assert_correct(case, out, cache)


# --- index arithmetic and sizes -----------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("num_new", [1, 8])
def test_index_arithmetic_at_a_million_tokens(window: int | None, num_new: int) -> None:
    """The cursor and the item records, run without arrays at the end of a very long row."""
    length, seq = 1 << 20, 255
    kernel = object.__new__(decode._Kernel)
    scoring = Scoring(1.0, has_window=window is not None)
    blocks = DecodeBlocks(block_tokens=256, num_slots=6, decode_queries=num_new)
    kernel.shape = DecodeShape(Geometry(8, 2, 128, 128, 16), scoring, blocks)
    kernel.num_decodes = jnp.int32(seq + 1)
    kernel.window = None if window is None else jnp.int32(window)
    lines = length // 16 // 128
    seqs = np.array([length - 5, num_new, seq * 8, seq * lines] * (seq + 2), np.int32)
    records: dict[int, Any] = {}
    kernel.scalars = SimpleNamespace(seqs=seqs)  # pyright: ignore[reportAttributeAccessIssue]
    kernel.own = SimpleNamespace(records=records)  # pyright: ignore[reportAttributeAccessIssue]
    started: list[int] = []
    kernel._start_line = lambda step, slot, line: started.append(int(line))
    base = length - 256
    cursor = kernel._seek_item(0, 0, (jnp.int32(seq), jnp.int32(base)))
    left = records[decode.LEFT]
    assert int(left) == 251
    for field, value in kernel._record(jnp.int32(seq), jnp.int32(base), left).items():
        records[field] = jnp.int32(value)
    assert started == [seq * lines + base // 16 // 128]
    assert int(cursor[0]) == seq + 1
    assert (int(records[decode.HI]), int(records[decode.LAST])) == (251, 1)
    tiles = [(int(start), bool(wanted)) for start, wanted in kernel._tiles(0)]
    written = [start for start, wanted in tiles if wanted]
    assert written == list(range((251 - num_new) // 16 * 16, 251, 16))
    first = 0 if window is None else length - 5 - num_new + 1 - window
    assert int(records[decode.BEHIND]) == base - first
    assert int(kernel._first_position(jnp.int32(seq))) == first // 256 * 256


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_default_blocks_fit_every_chip(chip: Chip) -> None:
    for heads in ((32, 8, 128), (8, 2, 128), (16, 8, 256), (4, 1, 256)):
        geometry = Geometry(*heads, heads[2], 16)
        blocks = decode.default_blocks(geometry, Scoring(1.0), chip)
        decode.check_blocks(geometry, Scoring(1.0), blocks, chip)


def test_float8_is_widened_for_chips_that_multiply_no_8_bits() -> None:
    geometry = Geometry(32, 8, 128, 128, 32, kv_dtype="float8_e4m3fn")
    widened = {
        name: decode.default_blocks(geometry, Scoring(1.0), chip).widen_float8
        for name, chip in CHIPS.items()
    }
    assert widened == {"v4": True, "v5e": False, "v5p": False, "v6e": False, "tpu7x": False}
    with pytest.raises(ValueError, match="v4 multiplies no float8: its blocks need widen_float8"):
        decode.check_blocks(geometry, Scoring(1.0), DecodeBlocks(256, 8), CHIPS["v4"])


def test_blocks_that_do_not_fit_are_refused_with_a_choice_that_fits() -> None:
    geometry, chip = Geometry(32, 8, 128, 128, 128), CHIPS["v4"]
    with pytest.raises(ValueError, match=r"more than v4 has; a choice that fits: DecodeBlocks\("):
        decode.check_blocks(geometry, Scoring(1.0), DecodeBlocks(2048, 8), chip)
