import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tpu_engine.kv_pages import PageError, PagePool


def take(pool: PagePool, count: int) -> np.ndarray:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def test_hands_out_every_page_but_the_null_page_once():
    pool = PagePool(8)
    assert sorted(take(pool, 7).tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert (pool.num_free, pool.num_owned, pool.num_usable) == (0, 7, 7)


def test_too_many_changes_nothing():
    pool = PagePool(4)
    take(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.audit()


def test_released_pages_are_free_at_once_without_a_step():
    pool = PagePool(4)
    pages = take(pool, 3)
    pool.release(pages)
    assert (pool.num_free, pool.num_in_flight) == (3, 0)


def test_pages_of_a_step_come_back_when_it_is_collected():
    pool = PagePool(6)
    early, late = take(pool, 2), take(pool, 3)
    pool.release(early, last_step=1)
    pool.release(late, last_step=2)
    assert (pool.num_free, pool.num_in_flight, pool.num_owned) == (0, 5, 0)
    pool.collect(1)
    assert (pool.num_free, pool.num_in_flight) == (2, 3)
    assert set(take(pool, 2).tolist()) == set(early.tolist())
    pool.collect(2)
    assert (pool.num_free, pool.num_in_flight) == (3, 0)
    pool.audit()


def test_a_step_that_is_collected_already_holds_nothing():
    pool = PagePool(3)
    pages = take(pool, 2)
    pool.collect(5)
    pool.release(pages, last_step=5)
    assert pool.num_free == 2


def test_shared_pages_wait_for_the_last_owner_and_the_last_step_of_any():
    pool = PagePool(3)
    pages = take(pool, 2)
    pool.share(pages)
    pool.release(pages, last_step=7)
    assert pool.num_owned == 2
    pool.release(pages, last_step=3)
    pool.collect(3)
    assert (pool.num_free, pool.num_in_flight) == (0, 2)
    pool.collect(7)
    assert pool.num_free == 2


def test_generation_counts_how_often_a_page_was_given_back():
    pool = PagePool(2)
    pages = take(pool, 1)
    assert pool.generations(pages).tolist() == [0]
    pool.release(pages, last_step=1)
    assert pool.generations(pages).tolist() == [0]
    pool.collect(1)
    assert pool.generations(pages).tolist() == [1]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0], "outside 1..5"),
        ([6], "outside 1..5"),
        ([-1], "outside 1..5"),
        ([1, 1], "the same page twice"),
        ([5], "without an owner"),
    ],
)
def test_misuse_raises(pages: list[int], message: str):
    pool = PagePool(6)
    take(pool, 2)
    for action in (pool.release, pool.share):
        with pytest.raises(PageError, match=message):
            action(np.array(pages, np.int32))
    pool.audit()


def test_double_free_raises():
    pool = PagePool(6)
    pages = take(pool, 2)
    pool.release(pages, last_step=1)
    with pytest.raises(PageError, match="without an owner"):
        pool.release(pages)


def test_wrong_counts_and_order_raise():
    with pytest.raises(PageError, match="num_pages=1"):
        PagePool(1)
    pool = PagePool(2)
    with pytest.raises(PageError, match="at least 0"):
        pool.allocate(-1)
    pool.collect(3)
    with pytest.raises(PageError, match="step 2 collected after step 3"):
        pool.collect(2)


class PoolMachine(RuleBasedStateMachine):
    """Random owners, sharers and steps; the model is a dict of owners per page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.held: list[np.ndarray] = []
        self.step = 0
        self.collected = 0
        self.last_use: dict[int, int] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        owned = {page for group in self.held for page in group.tolist()}
        if pages is None:
            return
        assert not owned & set(pages.tolist())
        for page in pages.tolist():
            assert self.last_use.get(page, 0) <= self.collected, "reused while in flight"
        self.held.append(pages)

    @rule()
    def dispatch(self) -> None:
        self.step += 1

    @rule()
    def collect(self) -> None:
        if self.collected < self.step:
            self.collected += 1
            self.pool.collect(self.collected)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.held:
            pages = data.draw(st.sampled_from(self.held))
            self.pool.share(pages)
            self.held.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.release(pages, self.step)
            self.last_use |= dict.fromkeys(pages.tolist(), self.step)

    @invariant()
    def every_page_in_one_state(self) -> None:
        self.pool.audit()
        owned = {page for group in self.held for page in group.tolist()}
        assert self.pool.num_owned == len(owned)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
