"""Rows that stand at every border, for tests of any backend and for kernel tests.

Owns which lengths are worth trying. A row is (positions before the step, new tokens), as
`attention_cases.make_case` takes it.
"""

from __future__ import annotations

Rows = list[tuple[int, int]]

# (query heads, KV heads): every ratio people use, multi-head, and one KV head for all.
HEAD_COUNTS = [(4, 4), (9, 3), (8, 2), (5, 1), (14, 2), (8, 1), (32, 2)]
PAGE_SIZES = [16, 32, 64, 128, 256]

MIXES: dict[str, Rows] = {
    "one decode of one position": [(0, 1)],
    "decodes at page borders": [(14, 1), (15, 1), (16, 1), (17, 1), (0, 1), (126, 1)],
    "whole prompt": [(0, 33)],
    "chunk continues mid page": [(21, 40)],
    "decodes and chunks": [(5, 1), (0, 7), (64, 1), (31, 33), (2, 2)],
    "full to the last token": [(0, 32), (96, 32)],
    "verify rows": [(15, 2), (0, 3), (29, 8), (47, 5), (60, 1)],
    "empty step": [],
}


def lengths(page: int, *borders: int) -> list[int]:
    """KV lengths around one page and around each border (block, window, ...), and 1."""
    around = {n + d for n in (page, *borders) for d in (-1, 0, 1)}
    return sorted({1, *(n for n in around if n > 0)})


def decodes(page: int, *borders: int) -> Rows:
    """One new token at the end of every length."""
    return [(n - 1, 1) for n in lengths(page, *borders)]


def verifies(page: int, *borders: int, longest: int = 8) -> Rows:
    """2 to `longest` new tokens, starting before, at and after each border."""
    starts = [n - 1 for n in lengths(page, *borders)]
    straddling = [max(n - longest // 2, 0) for n in (page, *borders)]
    rows = [(start, 2 + i % (longest - 1)) for i, start in enumerate(starts)]
    return rows + [(start, longest) for start in straddling]


def prompts(page: int, *borders: int) -> Rows:
    """Whole prompts of every length; a length of one is a decode at position 0."""
    return [(0, n) for n in lengths(page, *borders)]


def chunks(page: int, *borders: int) -> Rows:
    """Chunks that start or end at, before and after each border."""
    rows: Rows = []
    for n in borders:
        rows += [(n - 1, page + 1), (n, page), (n + 1, 2), (page + 3, n), (2 * page - 1, n - 1)]
    return rows
