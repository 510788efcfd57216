"""Random ragged batches for attention tests, and a float64 NumPy oracle that shares no code.

Owns the construction of page tables with NaN in every slot nobody owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One packed batch; arrays as the op takes them, `history` as the oracle needs it."""

    q: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray
    cache: np.ndarray
    layer: int
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: int

    def arguments(self) -> tuple:
        return (
            self.q,
            self.k_new,
            self.v_new,
            self.cache,
            np.int32(self.layer),
            self.page_table,
            self.kv_lens,
            self.cu_q_lens,
            np.int32(self.num_seqs),
        )


def make_case(
    rows: list[tuple[int, int]],
    *,
    num_tokens: int,
    num_rows: int,
    heads: tuple[int, int, int] = (4, 2, 16),
    page_size: int = 16,
    pages_per_seq: int = 8,
    seed: int = 0,
) -> Case:
    """Builds a case from `rows` of (kv_len before the step, q_len); `heads` is (N, K, H)."""
    rng = np.random.default_rng(seed)
    n, k, h = heads
    layers, num_pages = 2, num_rows * pages_per_seq + 1
    layer = int(rng.integers(layers))
    cache = np.full((layers, num_pages, 2, k, page_size, h), np.nan, np.float32)
    order = rng.permutation(num_pages - 1) + 1
    page_table = np.zeros((num_rows, pages_per_seq), np.int32)
    kv_lens = np.zeros(num_rows, np.int32)
    cu_q_lens = np.zeros(num_rows + 1, np.int32)
    taken = 0
    for i, (before, q_len) in enumerate(rows):
        needed = -(-(before + q_len) // page_size)
        page_table[i, :needed] = order[taken : taken + needed]
        taken += needed
        for p in range(before):
            page = page_table[i, p // page_size]
            cache[layer, page, :, :, p % page_size] = rng.normal(size=(2, k, h))
        kv_lens[i] = before + q_len
        cu_q_lens[i + 1] = cu_q_lens[i] + q_len
    cu_q_lens[len(rows) + 1 :] = cu_q_lens[len(rows)]
    draw = lambda heads_: rng.normal(size=(num_tokens, heads_, h)).astype(np.float32)  # noqa: E731
    return Case(draw(n), draw(k), draw(k), cache, layer, page_table, kv_lens, cu_q_lens, len(rows))


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(out [T, N, H], cache)` in float64, one query and one head at a time."""
    cache = case.cache.copy()
    page_size = cache.shape[4]
    out = np.zeros(case.q.shape, np.float64)
    group = case.q.shape[1] // cache.shape[3]
    for row in range(case.num_seqs):
        first, last = int(case.cu_q_lens[row]), int(case.cu_q_lens[row + 1])
        for t in range(first, last):
            p = int(case.kv_lens[row]) - last + t
            slot = (case.layer, case.page_table[row, p // page_size])
            cache[slot][0, :, p % page_size] = case.k_new[t]
            cache[slot][1, :, p % page_size] = case.v_new[t]
        for t in range(first, last):
            p = int(case.kv_lens[row]) - last + t
            where = np.arange(p + 1)
            pages = case.page_table[row, where // page_size]
            kv = cache[case.layer, pages, :, :, where % page_size].astype(np.float64)
            for head in range(case.q.shape[1]):
                keys, values = kv[:, 0, head // group], kv[:, 1, head // group]
                scores = keys @ case.q[t, head].astype(np.float64) * case.q.shape[2] ** -0.5
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ values / weights.sum()
    return out, cache
