"""The estimate of how long warming still takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.shape import StepShape
from tpu_engine.warm_progress import WarmProgress, short_name

SHAPES = [StepShape(n, 1, 8, 1) for n in range(1, 13)]


def seen(*notes: tuple[str, float]) -> WarmProgress:
    progress = WarmProgress(SHAPES)
    for shape, (source, seconds) in zip(SHAPES, notes, strict=False):
        progress.note(shape, source, seconds)
    return progress


def test_nothing_is_claimed_before_anything_was_seen() -> None:
    progress = WarmProgress(SHAPES)
    assert progress.seconds_left is None
    assert progress.current == SHAPES[0]
    assert (progress.done, progress.total) == (0, 12)


def test_one_slow_shape_does_not_spoil_it() -> None:
    progress = seen(("compiled", 2.0), ("compiled", 90.0), ("compiled", 2.0))
    assert progress.seconds_left == pytest.approx(9 * 2.0)


def test_loaded_and_compiled_are_told_apart() -> None:
    """A cache that covers the first shapes only: the rest will be compiled, not loaded."""
    loads = [("loaded", 0.1)] * 4
    assert seen(*loads).seconds_left == pytest.approx(8 * 0.1)
    assert seen(*loads, *[("compiled", 10.0)] * 4).seconds_left == pytest.approx(4 * 10.0)
    half = seen(*loads, *[("compiled", 10.0)] * 2).seconds_left
    assert half == pytest.approx(6 * (0.1 + 10.0) / 2)


@given(st.lists(st.tuples(st.sampled_from(["loaded", "compiled"]), st.floats(0, 1e3)), max_size=12))
def test_it_stays_within_what_was_seen(notes: list[tuple[str, float]]) -> None:
    progress = seen(*notes)
    left = len(SHAPES) - len(notes)
    if not notes:
        return
    assert progress.seconds_left is not None
    times = [seconds for _, seconds in notes]
    assert left * min(times) * 0.999 <= progress.seconds_left <= left * max(times) * 1.001
    assert progress.current == (SHAPES[len(notes)] if left else None)


def test_names_are_short() -> None:
    assert short_name(StepShape(64, 8, 32, 8)) == "tokens=64 seqs=8"
    assert short_name(StepShape(64, 8, 32, 8, "greedy")) == "tokens=64 seqs=8 greedy"
    assert short_name(None) == ""
