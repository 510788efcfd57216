"""Random ragged batches for attention tests, and a float64 NumPy oracle that shares no code.

Owns how a case is built: NaN (127 where a dtype has none) in every slot nobody owns, in the null
page, in other layers and in the padding rows of `q`, `k_new` and `v_new`; unused entries of a page
table, and those left of a window, name the null page. Knows no backend: a case is what the op takes
(`arguments`, `options`), and equally what a kernel takes (`stored=True`: new keys and values
already in the cache's dtype; `value_width`: a shared plane).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kernels.attention.geometry import Geometry, Scoring

# Backends that take any shape and run at once; the kernels have tests of their own.
PLAIN_BACKENDS = ("reference", "xla")
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": FLOAT8,
}
# Of the exact result, and of the sum of |weight * value| (a sum that cancels keeps its error).
RELATIVE = {"float32": 1e-5, "bfloat16": 2.0**-8}
OF_MAGNITUDE = {"float32": 2e-6, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Spec:
    """What a case looks like besides its rows.

    Attributes:
        heads: (N, K, H); H is the width of a key row.
        value_width: not None: one plane, a value is the first `value_width` lanes of its key.
        stored: `k_new` and `v_new` come in the cache's dtype, as kernels take them.
        scales: static scales of K and V (one float each, varied by head); needs `stored=False`.
        gain: factor on random queries: 1 gives scores of spread 1, more gives peaked weights.
        decode_queries: rows of at most this many new tokens follow the tree (kernels: decode call).
        shared_pages: leading pages that all rows which are long enough have in common.
        pages_per_seq: width of the page table; None: one more than the longest row needs.
        num_pages: pages in the pool; None: the null page, those needed and one more. Fixed sizes
            let many cases share one compiled program.
    """

    heads: tuple[int, int, int] = (4, 2, 16)
    page_size: int = 16
    pages_per_seq: int | None = None
    num_pages: int | None = None
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    value_width: int | None = None
    stored: bool = False
    scales: tuple[float, float] | None = None
    gain: float = 1.0
    scale: float | None = None
    soft_cap: float | None = None
    window: int | None = None
    sinks: bool = False
    tree: bool = False
    decode_queries: int = 1
    shared_pages: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One packed batch as arrays, in the op's words; `spec` says how to read them."""

    q: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray | None
    cache: np.ndarray
    layer: int
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: int
    spec: Spec
    sinks: np.ndarray | None = None
    tree: np.ndarray | None = None
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments of `ragged_paged_attention`."""
        return (self.q, self.k_new, self.v_new, self.cache, np.int32(self.layer), *self.tables())

    def tables(self) -> tuple[Any, ...]:
        """(page_table, kv_lens, cu_q_lens, num_seqs)."""
        return (self.page_table, self.kv_lens, self.cu_q_lens, np.int32(self.num_seqs))

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `ragged_paged_attention` that are arrays."""
        given = dict(
            window=self.window(),
            sinks=self.sinks,
            tree=self.tree,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return {name: value for name, value in given.items() if value is not None}

    def static_options(self) -> dict[str, Any]:
        """The static keyword arguments of `ragged_paged_attention`."""
        spec = self.spec
        return dict(scale=spec.scale, soft_cap=spec.soft_cap, decode_queries=spec.decode_queries)

    def window(self) -> np.int32 | None:
        return None if self.spec.window is None else np.int32(self.spec.window)

    @property
    def factor(self) -> float:
        """The factor on the scores."""
        scale = self.spec.scale
        return float(self.q.shape[2]) ** -0.5 if scale is None else scale

    @property
    def num_tokens_used(self) -> int:
        return int(self.cu_q_lens[self.num_seqs])

    def geometry(self) -> Geometry:
        """The static facts a kernel is compiled for."""
        spec, (n, k, h) = self.spec, self.spec.heads
        width, latent = spec.value_width or h, spec.value_width is not None
        return Geometry(n, k, h, width, spec.page_size, spec.q_dtype, spec.kv_dtype, latent)

    def scoring(self) -> Scoring:
        spec = self.spec
        has_window = spec.window is not None
        return Scoring(self.factor, spec.soft_cap, has_window, spec.sinks, spec.tree)


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    **spec: Any,
) -> Case:
    """Builds a case from `rows` of (positions before the step, new tokens); see `Spec`.

    Without `num_tokens` and `num_rows` the step has three padding tokens and one padding row.
    """
    used = sum(q_len for _, q_len in rows)
    num_tokens = used + 3 if num_tokens is None else num_tokens
    num_rows = len(rows) + 1 if num_rows is None else num_rows
    assert len(rows) <= num_rows
    assert used <= num_tokens
    return _Builder(Spec(**spec), rows, num_tokens, num_rows).build()


class _Builder:
    def __init__(
        self, spec: Spec, rows: Sequence[tuple[int, int]], num_tokens: int, num_rows: int
    ) -> None:
        self.spec, self.rows, self.num_tokens, self.num_rows = spec, rows, num_tokens, num_rows
        self.rng = np.random.default_rng(spec.seed)
        self.q_dtype, self.kv_dtype = DTYPES[spec.q_dtype], DTYPES[spec.kv_dtype]
        self.planes = 2 if spec.value_width is None else 1
        # Spread of stored values: 8-bit values with scales use most of the dtype's range.
        wide = 74.0 if self.kv_dtype == np.int8 else 100.0 if spec.scales else 1.0
        self.stored_spread = wide

    def build(self) -> Case:
        spec, (n, k, h) = self.spec, self.spec.heads
        layer = int(self.rng.integers(2))
        page_table, needed = self.page_table()
        num_pages = spec.num_pages or needed + 2
        assert needed < num_pages
        cache = _empty((2, num_pages, self.planes, k, spec.page_size, h), self.kv_dtype)
        q_lens = np.array([q_len for _, q_len in self.rows], np.int32)
        cu_q_lens = np.full(self.num_rows + 1, q_lens.sum(), np.int32)
        cu_q_lens[: len(self.rows)] = np.cumsum(q_lens) - q_lens
        kv_lens = np.zeros(self.num_rows, np.int32)
        for i, (before, q_len) in enumerate(self.rows):
            kv_lens[i] = before + q_len
            where = np.arange(self.first_visible(before), before)
            pages, slots = page_table[i, where // spec.page_size], where % spec.page_size
            # A row that shares pages with an earlier one overwrites them: same for both.
            cache[layer, pages, :, :, slots] = self.keys(len(where), self.planes, k, h)
        used = int(q_lens.sum())
        q = _empty((self.num_tokens, n, h), self.q_dtype)
        q[:used] = self.queries(used, n, h).astype(self.q_dtype)
        k_new, v_new = (self.new_rows(used, scale) for scale in spec.scales or (1.0, 1.0))
        k_scale, v_scale = self.scales()
        return Case(
            q, k_new, v_new if self.planes == 2 else None, cache, layer, page_table, kv_lens,
            cu_q_lens, len(self.rows), spec, self.sinks(), self.tree(), k_scale, v_scale,
        )  # fmt: skip

    def first_visible(self, before: int) -> int:
        return max(0, before - self.spec.window + 1) if self.spec.window else 0

    def page_table(self) -> tuple[np.ndarray, int]:
        """Random pages for every page that is visible or written, and how many those are."""
        spec = self.spec
        owned: list[tuple[int, range]] = []
        for i, (before, q_len) in enumerate(self.rows):
            first = self.first_visible(before) // spec.page_size
            owned.append((i, range(first, -(-(before + q_len) // spec.page_size))))
        needed = sum(len(pages) for _, pages in owned)
        order = iter(self.rng.permutation(needed + 1) + 1)
        widest = max((pages.stop for _, pages in owned), default=0) + 1
        table = np.zeros((self.num_rows, spec.pages_per_seq or widest), np.int32)
        for i, pages in owned:
            assert pages.stop <= table.shape[1], (self.rows[i], spec)
            for page in pages:
                table[i, page] = next(order)
        self.share(table)
        return table, needed

    def share(self, table: np.ndarray) -> None:
        """Gives one row's leading pages to all rows that only read them."""
        shared = self.spec.shared_pages
        length = shared * self.spec.page_size
        long = [i for i, (before, _) in enumerate(self.rows) if before >= length]
        for i in long[1:]:
            both = (table[i, :shared] > 0) & (table[long[0], :shared] > 0)
            table[i, :shared][both] = table[long[0], :shared][both]

    def keys(self, *shape: int) -> np.ndarray:
        """Random rows in the cache's dtype."""
        if self.kv_dtype == np.int8:
            return self.rng.integers(-127, 128, shape).astype(np.int8)
        rows = self.rng.normal(size=shape) * self.stored_spread
        return np.clip(rows, -FLOAT8_MAX, FLOAT8_MAX).astype(self.kv_dtype)

    def queries(self, *shape: int) -> np.ndarray:
        k_scale = self.spec.scales[0] if self.spec.scales else 1.0
        return self.rng.normal(size=shape) * self.spec.gain / (self.stored_spread * k_scale)

    def new_rows(self, used: int, scale: float) -> np.ndarray:
        """Random new keys or values, some of them beyond what an 8-bit cache holds."""
        spec, (_, k, h) = self.spec, self.spec.heads
        rows = _empty((self.num_tokens, k, h), self.kv_dtype if spec.stored else self.q_dtype)
        if spec.stored:
            rows[:used] = self.keys(used, k, h)
        else:
            wide = self.rng.normal(size=(used, k, h)) * self.stored_spread * scale
            rows[:used] = wide.astype(self.q_dtype)
        return rows

    def scales(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        if self.spec.scales is None:
            return None, None
        k = self.spec.heads[1]
        vary = lambda base: (base * self.rng.uniform(0.7, 1.4, k)).astype(np.float32)  # noqa: E731
        return vary(self.spec.scales[0]), vary(self.spec.scales[1])

    def sinks(self) -> np.ndarray | None:
        if not self.spec.sinks:
            return None
        return self.rng.normal(size=self.spec.heads[0]).astype(np.float32) * 2

    def tree(self) -> np.ndarray | None:
        """Random trees for short rows; noise where the tree means nothing."""
        if not self.spec.tree:
            return None
        bits = self.rng.integers(-(2**31), 2**31, self.num_tokens)
        taken = 0
        for _, q_len in self.rows:
            if q_len <= self.spec.decode_queries:
                for j in range(q_len):
                    parent = int(self.rng.integers(-1, j)) if j else -1
                    above = bits[taken + parent] if parent >= 0 else 0
                    bits[taken + j] = above | 1 << j
            taken += q_len
        return bits.astype(np.int32)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, 127 if dtype == np.int8 else np.nan, dtype)


class Expected(NamedTuple):
    """What is right: output, cache, and the sum of |weight * value| behind each output."""

    out: np.ndarray
    cache: np.ndarray
    magnitude: np.ndarray


def oracle(case: Case) -> Expected:
    """Returns `out [T, N, value width]` in float64 and the cache, one query at a time."""
    spec, cache = case.spec, case.cache.copy()
    width = spec.value_width or spec.heads[2]
    out = np.zeros((*case.q.shape[:2], width), np.float64)
    magnitude = np.zeros_like(out)
    for row in range(case.num_seqs):
        first, last = int(case.cu_q_lens[row]), int(case.cu_q_lens[row + 1])
        before = int(case.kv_lens[row]) - (last - first)
        for j, t in enumerate(range(first, last)):
            page = case.page_table[row, (before + j) // spec.page_size]
            slot = (before + j) % spec.page_size
            cache[case.layer, page, 0, :, slot] = _to_cache(case.k_new[t], cache, case.k_scale)
            if case.v_new is not None:
                cache[case.layer, page, 1, :, slot] = _to_cache(case.v_new[t], cache, case.v_scale)
        for j, t in enumerate(range(first, last)):
            where = _visible(case, before, j, t, last - first)
            pages, slots = case.page_table[row, where // spec.page_size], where % spec.page_size
            kv = cache[case.layer, pages, :, :, slots].astype(np.float64)  # [n, planes, K, H]
            out[t], magnitude[t] = _attend(case, case.q[t].astype(np.float64), kv, width)
    return Expected(out, cache, magnitude)


def _to_cache(row: np.ndarray, cache: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    if row.dtype == cache.dtype:
        return row
    value = row.astype(np.float32) / (np.float32(1) if scale is None else scale[:, None])
    if cache.dtype == np.int8:
        return np.clip(np.rint(value), -127, 127).astype(np.int8)
    if cache.dtype == FLOAT8:
        value = np.clip(value, -FLOAT8_MAX, FLOAT8_MAX)
    return value.astype(cache.dtype)


def _visible(case: Case, before: int, j: int, t: int, q_len: int) -> np.ndarray:
    """Positions that new token `j` of a row sees."""
    where = np.arange(before + j + 1)
    if case.spec.window:
        where = where[where > before + j - case.spec.window]
    if case.tree is not None and q_len <= case.spec.decode_queries:
        seen = [p < before or int(case.tree[t]) >> (p - before) & 1 for p in where.tolist()]
        where = where[np.array(seen, bool)]
    return where


def _attend(case: Case, q: np.ndarray, kv: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    keys = kv[:, 0]
    values = keys[..., :width] if case.v_new is None else kv[:, 1]
    if case.k_scale is not None:
        keys = keys * case.k_scale[None, :, None].astype(np.float64)
    if case.v_scale is not None:
        values = values * case.v_scale[None, :, None].astype(np.float64)
    out, magnitude = np.zeros((q.shape[0], width)), np.zeros((q.shape[0], width))
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // keys.shape[1])
        scores = keys[:, kv_head] @ q[head] * case.factor
        if case.spec.soft_cap is not None:
            scores = case.spec.soft_cap * np.tanh(scores / case.spec.soft_cap)
        sink = -np.inf if case.sinks is None else float(case.sinks[head])
        top = max(scores.max(initial=-np.inf), sink)
        weights = np.exp(scores - top)
        weights = weights / (weights.sum() + np.exp(sink - top))
        out[head] = weights @ values[:, kv_head]
        magnitude[head] = weights @ np.abs(values[:, kv_head])
    return out, magnitude


def assert_correct(
    case: Case,
    out: np.ndarray,
    cache: np.ndarray | None,
    *,
    padding_is_zero: bool = True,
    slack: float = 1.0,
) -> Expected:
    """Compares with the oracle: outputs within the query dtype's tolerance, pages exactly.

    The null page (0) takes what belongs nowhere, so it is not compared. A cache that lies otherwise
    than the case's is left to the caller: pass None and compare with the result. `slack` widens the
    tolerance where queries are rounded once more (scales folded into bfloat16).
    """
    expected, name = oracle(case), case.spec.q_dtype
    used = case.num_tokens_used
    assert out.dtype == DTYPES[name]
    got, right = out[:used].astype(np.float64), expected.out[:used]
    limit = RELATIVE[name] * np.abs(right) + OF_MAGNITUDE[name] * expected.magnitude[:used]
    worst = np.max(np.abs(got - right) / np.maximum(limit, 1e-30), initial=0.0)
    assert worst <= slack, f"{worst:.3g} times the tolerance; {_where(got, right, limit)}"
    if padding_is_zero:
        assert np.array_equal(out[used:], np.zeros_like(out[used:]))
    if cache is not None:
        assert cache.dtype == case.cache.dtype
        np.testing.assert_array_equal(
            cache[:, 1:].astype(np.float32), expected.cache[:, 1:].astype(np.float32)
        )
    return expected


def _where(got: np.ndarray, right: np.ndarray, limit: np.ndarray) -> str:
    bad = ~(np.abs(got - right) <= limit)
    tokens = np.unique(np.nonzero(bad)[0]).tolist()
    return f"{bad.sum()} of {bad.size} values, tokens {tokens[:8]}"
