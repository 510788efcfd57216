"""The page pool: who may write which KV page, and when a page may be used again.

Owns the free list, reference counts, generations and in-flight marks of one KV group. A page is
in exactly one state: free, owned (reference count >= 1), or in flight (no owner any more, but a
step that was dispatched may still write it). Page 0 is the null page and never handed out.
Doesn't know requests, tokens, page contents or devices; steps are increasing ids from 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class PageError(RuntimeError):
    """Pages were used against the pool's rules (double free, null page, ...): a program error."""


class PagePool:
    """Hands out pages `1 .. num_pages - 1`, at most once at a time."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page; raises `PageError` below 2."""
        if num_pages < 2:
            raise PageError(f"a pool needs the null page and one more, got num_pages={num_pages}")
        self._num_pages = num_pages
        self._free: Int32 = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._refcount: Int32 = np.zeros(num_pages, np.int32)
        self._generation: Int32 = np.zeros(num_pages, np.int32)
        self._busy_until = np.zeros(num_pages, np.int64)
        self._returning: dict[int, list[Int32]] = {}
        self._num_in_flight = 0
        self._collected = 0

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out at all: the null page is not one."""
        return self._num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_in_flight(self) -> int:
        """Pages without an owner that come back once their last step is collected."""
        return self._num_in_flight

    @property
    def num_owned(self) -> int:
        return self.num_usable - self._num_free - self._num_in_flight

    def allocate(self, count: int) -> Int32 | None:
        """`count` pages with reference count 1, or None (and nothing changed) if too few are free.

        The caller owns the returned array `[count]`.
        """
        if count < 0:
            raise PageError(f"count must be at least 0, got {count}")
        if count > self._num_free:
            return None
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._refcount[pages] = 1
        return pages

    def share(self, pages: Int32) -> None:
        """Adds one owner to each of `pages`; raises `PageError` for a page that has none."""
        self._require_owned(pages, "share")
        self._refcount[pages] += 1

    def release(self, pages: Int32, last_step: int = 0) -> None:
        """Takes one owner from each of `pages`; raises `PageError` for a page that has none.

        `last_step` is the last dispatched step in which this owner's row touches the pages (0:
        none). A page without owners is free at once, or when that step has been collected.
        """
        self._require_owned(pages, "release")
        self._refcount[pages] -= 1
        self._busy_until[pages] = np.maximum(self._busy_until[pages], last_step)
        gone = pages[self._refcount[pages] == 0]
        busy = self._busy_until[gone]
        self._put_back(gone[busy <= self._collected])
        for step in np.unique(busy[busy > self._collected]).tolist():
            waiting = gone[busy == step]
            self._returning.setdefault(step, []).append(waiting)
            self._num_in_flight += len(waiting)

    def collect(self, step_id: int) -> None:
        """Step `step_id` and all before it are done: pages that waited for them are free."""
        if step_id < self._collected:
            raise PageError(f"step {step_id} collected after step {self._collected}")
        self._collected = step_id
        for step in sorted(step for step in self._returning if step <= step_id):
            for pages in self._returning.pop(step):
                self._num_in_flight -= len(pages)
                self._put_back(pages)

    def generations(self, pages: Int32) -> Int32:
        """How often each page was given back: a remembered page with an older value is stale."""
        return self._generation[pages]

    def audit(self) -> None:
        """Raises `PageError` unless every usable page is in exactly one state."""
        seen = np.zeros(self._num_pages, np.int32)
        seen[self._refcount > 0] += 1
        np.add.at(seen, self._free[: self._num_free], 1)
        for group in self._returning.values():
            for pages in group:
                np.add.at(seen, pages, 1)
        wrong = np.flatnonzero(seen[1:] != 1) + 1
        if seen[0] != 0 or len(wrong):
            raise PageError(f"pages not in exactly one state: {wrong.tolist()}, null: {seen[0]}")

    def _put_back(self, pages: Int32) -> None:
        count = len(pages)
        self._generation[pages] += 1
        self._free[self._num_free : self._num_free + count] = pages[::-1]
        self._num_free += count

    def _require_owned(self, pages: Int32, action: str) -> None:
        if len(pages) == 0:
            return
        if int(pages.min()) < 1 or int(pages.max()) >= self._num_pages:
            raise PageError(f"{action}: page outside 1..{self._num_pages - 1}: {pages.tolist()}")
        if len(np.unique(pages)) != len(pages):
            raise PageError(f"{action}: the same page twice: {pages.tolist()}")
        unowned = pages[self._refcount[pages] == 0]
        if len(unowned):
            raise PageError(f"{action}: pages without an owner: {unowned.tolist()}")
