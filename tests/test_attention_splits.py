"""Whatever way a prompt is served, its outputs and its cache are the same.

A prompt is cut into chunks anywhere; each chunk runs in a step with other rows, in any order, with
its tokens in any pages. `SPLIT_BACKENDS` names the backends that this holds for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import ragged_paged_attention, small_plan
from kernels.attention.cache_layout import kv_layout
from kernels.attention.geometry import Scoring
from tests.attention_cases import DTYPES
from tests.test_attention_layout import laid_out
from tests.test_pallas_attention import FAST_COMPILE

SPLIT_BACKENDS = ["xla"]
LENGTH = 70
PAGE = 16
WIDTH = 5  # pages per row
ROWS = 4
TOKENS = 96
HEADS = (6, 2, 16)
OP = jax.jit(ragged_paged_attention, static_argnames="backend")
KERNELS = jax.jit(
    ragged_paged_attention,
    static_argnames=("backend", "layout", "kernels"),
    compiler_options=FAST_COMPILE,
)


@dataclass(frozen=True)
class Served:
    """What came of a prompt: its outputs, and its keys and values as they were stored."""

    out: np.ndarray
    stored: np.ndarray


class Server:
    """Serves one prompt step by step over pages of its own choosing."""

    def __init__(self, seed: int, pages: int, window: int, kv_dtype: str, backend: str) -> None:
        n, k, h = HEADS
        prompt = np.random.default_rng(seed)
        self.q = prompt.normal(size=(LENGTH, n, h)).astype(np.float32)
        self.new = prompt.normal(size=(2, LENGTH, k, h)).astype(np.float32)
        self.op, self.options = OP, dict[str, Any](window=np.int32(window), backend=backend)
        if kv_dtype == "int8":
            scale = np.array([0.02, 0.03], np.float32)
            self.options |= dict(k_scale=scale, v_scale=scale)
        self.window, self.rng = window, np.random.default_rng(pages)
        order = self.rng.permutation(ROWS * WIDTH) + 1
        self.pages = order.reshape(ROWS, WIDTH).astype(np.int32)
        # The prompt's pages hold nothing yet, those of its companions (rows 1..) anything.
        shape = (2, ROWS * WIDTH + 1, 2, k, PAGE, h)
        self.cache = (self.rng.normal(size=shape) * 50).astype(DTYPES[kv_dtype])
        self.free([0, *self.pages[0]])
        if backend == "pallas-interpret":
            self.run_on_kernels(kv_dtype)

    def run_on_kernels(self, kv_dtype: str) -> None:
        """The same pages in rows of whole registers, as the kernels read them."""
        n, k, h = HEADS
        layout = kv_layout(num_kv_heads=k, head_dim=h, page_size=PAGE, dtype=kv_dtype, lanes=128)
        scoring = Scoring(h**-0.5, has_window=True)
        plan = small_plan(layout.geometry(n, "float32"), scoring)
        self.op, self.cache = KERNELS, laid_out(self.cache, layout)
        self.options |= dict(layout=layout, kernels=plan)

    def free(self, pages: list[int]) -> None:
        """Nobody owns these: NaN, or the largest value where a dtype has none."""
        self.cache[:, pages] = 127 if self.cache.dtype == np.int8 else np.nan

    def serve(self, cuts: list[int], with_others: bool) -> Served:
        out, stored = [], []
        for first, last in pairwise([0, *sorted(cuts), LENGTH]):
            rows = [(0, first, last - first)]
            if with_others:
                for other in range(1, ROWS):
                    q_len = int(self.rng.integers(0, 9))
                    rows.append((other, int(self.rng.integers(0, WIDTH * PAGE - 8)), q_len))
                rows = [rows[i] for i in self.rng.permutation(ROWS) if rows[i][2]]
            out.append(self.step(rows, first, last))
            where = np.arange(first, last)
            stored.append(self.cache[1, self.pages[0, where // PAGE], :, :, where % PAGE])
        return Served(np.concatenate(out), np.concatenate(stored))

    def step(self, rows: list[tuple[int, int, int]], first: int, last: int) -> np.ndarray:
        """Runs rows of (sequence, positions before, new tokens); the prompt's outputs."""
        q = np.full((TOKENS, *HEADS[::2]), np.nan, np.float32)
        new = np.full((2, TOKENS, *HEADS[1:]), np.nan, np.float32)
        table = np.zeros((ROWS, WIDTH), np.int32)
        kv_lens, cu_q_lens = np.zeros(ROWS, np.int32), np.zeros(ROWS + 1, np.int32)
        place = slice(0, 0)
        for i, (sequence, before, q_len) in enumerate(rows):
            tokens = slice(int(cu_q_lens[i]), int(cu_q_lens[i]) + q_len)
            table[i], kv_lens[i], cu_q_lens[i + 1 :] = (
                self.pages[sequence],
                before + q_len,
                tokens.stop,
            )
            q[tokens] = self.rng.normal(size=q[tokens].shape)
            new[:, tokens] = self.rng.normal(size=new[:, tokens].shape)
            if sequence == 0:
                place = tokens
                q[tokens], new[:, tokens] = self.q[first:last], self.new[:, first:last]
                gone = max(before - self.window + 1, 0) // PAGE if self.window else 0
                table[i, :gone] = 0
                self.free(list(self.pages[0, :gone]))
        tables = (table, kv_lens, cu_q_lens, np.int32(len(rows)))
        out, cache = self.op(q, *new, self.cache, np.int32(1), *tables, **self.options)
        self.cache = np.array(cache)
        return np.asarray(out)[place]


@pytest.mark.parametrize("backend", SPLIT_BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=4, unique=True),
    seed=st.integers(0, 99),
    window=st.sampled_from([0, 20]),
)
def test_any_way_of_serving_a_prompt(
    backend: str, kv_dtype: str, cuts: list[int], seed: int, window: int
) -> None:
    assert_same_however_split(backend, kv_dtype, cuts, seed, window)


def assert_same_however_split(
    backend: str, kv_dtype: str, cuts: list[int], seed: int, window: int
) -> None:
    whole = Server(seed, 0, window, kv_dtype, backend).serve([], with_others=False)
    parts = Server(seed, seed + 1, window, kv_dtype, backend).serve(cuts, with_others=True)
    np.testing.assert_array_equal(parts.stored, whole.stored)
    np.testing.assert_allclose(parts.out, whole.out, rtol=1e-5, atol=3e-6)
    assert np.ptp(whole.out) > 0.5


# The interpreter is too slow for random search: cuts at, beside and away from the borders of pages.
KERNEL_SPLITS = {
    "cuts": [1, 33],
    "a cut in every page": [1, 17, 48],
    "cuts one after the other": [31, 32, 33, 34],
    "a last token alone": [69],
    "pages of their own": [16, 32, 48, 64],
}


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("cuts", 20),
        *(
            pytest.param(name, window, marks=pytest.mark.long)
            for name in KERNEL_SPLITS
            for window in (0, 20)
            if (name, window) != ("cuts", 20)
        ),
    ],
)
@pytest.mark.timeout(600)
def test_pallas_any_way_of_serving_a_prompt(name: str, window: int) -> None:
    cuts = KERNEL_SPLITS[name]
    assert_same_however_split("pallas-interpret", "float32", cuts, len(name), window)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pallas_a_prompt_decoded_token_by_token() -> None:
    cuts = list(range(1, LENGTH))
    assert_same_however_split("pallas-interpret", "float32", cuts, 5, 20)


@pytest.mark.parametrize("backend", SPLIT_BACKENDS)
def test_a_prompt_decoded_token_by_token(backend: str) -> None:
    whole = Server(5, 0, 20, "float32", backend).serve([], with_others=False)
    parts = Server(5, 7, 20, "float32", backend).serve(list(range(1, LENGTH)), with_others=True)
    np.testing.assert_array_equal(parts.stored, whole.stored)
    np.testing.assert_allclose(parts.out, whole.out, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("backend", SPLIT_BACKENDS)
def test_the_same_step_twice_is_bit_equal(backend: str) -> None:
    one = Server(3, 2, 0, "float32", backend).serve([17, 33], with_others=True)
    two = Server(3, 2, 0, "float32", backend).serve([17, 33], with_others=True)
    np.testing.assert_array_equal(one.out, two.out)
