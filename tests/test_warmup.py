"""Warm-up in worker processes: failures, damage, a killed job, two jobs on one folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from buckets.cache_store import CacheStore
from buckets.shape import StepShape
from buckets.warmup import WarmedShape, WorkerLost, already_stored, warm_up
from tests.small_programs import SHAPES
from tests.warm_programs import ENDS_THE_PROCESS, FAILS, Opening, no_opening

MANY = [StepShape(n, 1, 1, 1) for n in range(1, 9)]


def stored(directory: Path) -> set[StepShape]:
    programs, store = Opening(directory)()
    return set(already_stored(programs, store, MANY))


def outcomes(done: list[WarmedShape]) -> dict[StepShape, str]:
    return {one.shape: one.outcome for one in done}


def test_what_is_missing_is_built_and_what_fails_is_named(tmp_path: Path) -> None:
    first, last = SHAPES
    wanted = [first, FAILS, ENDS_THE_PROCESS, last]
    done = list(warm_up(Opening(tmp_path), wanted))
    assert outcomes(done) == {
        first: "built",
        FAILS: "failed",
        ENDS_THE_PROCESS: "failed",
        last: "built",
    }
    notes = {one.shape: one.note for one in done}
    assert "this one can't be lowered" in notes[FAILS]
    assert "ended with code 7: F1201 compiler: check failed" in notes[ENDS_THE_PROCESS]
    assert all(one.facts is not None for one in done if one.outcome == "built")
    assert stored(tmp_path) == {first, last}


def test_damaged_entries_are_built_again_and_the_others_reused(tmp_path: Path) -> None:
    list(warm_up(Opening(tmp_path), SHAPES))
    damaged = min(tmp_path.glob("entries/*.executable"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(stored(tmp_path)) == 1
    done = list(warm_up(Opening(tmp_path), SHAPES))
    assert sorted(one.outcome for one in done) == ["built", "reused"]
    assert stored(tmp_path) == set(SHAPES)


def test_a_folder_that_takes_nothing_is_a_failure(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    (tmp_path / "entries").write_text("not a folder")
    done = list(warm_up(Opening(tmp_path), SHAPES[:1]))
    assert outcomes(done) == {SHAPES[0]: "failed"}
    assert "not stored" in done[0].note
    assert store.entries() == {}


def test_workers_that_can_not_open_end_the_warm_up(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="there is no such folder"):
        list(warm_up(no_opening, SHAPES))


def job(directory: Path, slow_s: float, answers: Any) -> None:
    for one in warm_up(Opening(directory, slow_s), MANY):
        answers.put((one.shape, one.outcome))


def test_two_jobs_on_one_folder_do_nothing_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    jobs = [context.Process(target=job, args=(tmp_path, 0.2, answers)) for _ in range(2)]
    for one in jobs:
        one.start()
    found = [answers.get(timeout=120) for _ in range(2 * len(MANY))]
    for one in jobs:
        one.join()
    built = [shape for shape, outcome in found if outcome == "built"]
    assert sorted(built) == MANY
    assert [outcome for _, outcome in found].count("reused") == len(MANY)


def test_a_killed_job_continues_where_it_was(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    killed = context.Process(target=job, args=(tmp_path, 0.5, answers))
    killed.start()
    shapes = {answers.get(timeout=120)[0] for _ in range(2)}
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    started = time.monotonic()
    assert shapes <= stored(tmp_path)
    done = outcomes(list(warm_up(Opening(tmp_path), MANY)))
    assert {done[shape] for shape in shapes} == {"reused"}
    assert stored(tmp_path) == set(MANY)
    assert time.monotonic() - started < 60  # nobody waits for a claim of the dead


def test_claims_are_held_by_one_and_freed(tmp_path: Path) -> None:
    store, other = CacheStore(tmp_path), CacheStore(tmp_path)
    with store.claim("a", patient=False) as ours, other.claim("a", patient=False) as theirs:
        assert (ours, theirs) == (True, False)
        with other.claim("b", patient=False) as another:
            assert another
    with other.claim("a", patient=True) as theirs:
        assert theirs
    assert list((tmp_path / "claims").iterdir()) == []
