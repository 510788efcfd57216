"""Errors cross process borders: pickled and back, nothing lost."""

from __future__ import annotations

import pickle

import pytest

from tpu_engine import errors

ERRORS = [
    errors.EngineError("plain"),
    errors.InvalidRequest("top_p", "in (0, 1]", 7.5),
    errors.InvalidConfig("page_size", "one of 8, 16", 3),
    errors.InvalidModel("tensor x is missing"),
    errors.Overloaded("waiting requests", 4, 5, 1.5),
    errors.CompileMiss("a shape", (1, 2), "not in the plan"),
    errors.DeviceFault("gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_survives_pickling(error: errors.EngineError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__
