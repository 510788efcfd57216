"""Two reports side by side: which figures got worse.

Owns which figures are compared and which direction is better. Compile seconds are left out: they
depend on who else used the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from server.cli.kernel_lab.rows import IDENTITY, Row
from tpu_engine.errors import InvalidConfig

LESS_IS_BETTER = (
    "cycles_per_kv_token_head",
    "all_in_cycles_per_kv_token_head",
    "scheduled_cycles_per_kv_token_head",
    "vmem_bytes",
    "code_bytes",
    "prologue_us",
    "spills",
)
MORE_IS_BETTER = ("useful_flop_share", "scheduled_useful_flop_share")
BY_CONTEXT = (
    "roofline_share",
    "scheduled_roofline_share",
    "useful_flop_share_with_edges",
    "scheduled_useful_flop_share_with_edges",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that differs: `worse_by` is in percent, negative where it got better."""

    case: str
    figure: str
    before: float
    now: float
    worse_by: float

    def __str__(self) -> str:
        word = "worse" if self.worse_by > 0 else "better"
        return (
            f"{self.case}: {self.figure} {self.before:g} -> {self.now:g} "
            f"({abs(self.worse_by):.1f} % {word})"
        )


def read_report(path: Path) -> list[Row]:
    """The rows of a report file; raises `InvalidConfig` for anything else."""
    try:
        rows: Any = json.loads(path.read_text())
    except OSError as error:
        raise InvalidConfig("baseline", "a readable file", f"{path} ({error.strerror})") from error
    except ValueError as error:
        raise InvalidConfig("baseline", "a report in JSON", f"{path} ({error})") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and all(key in row for key in IDENTITY)
        for row in cast("list[object]", rows)
    ):
        raise InvalidConfig("baseline", "a list of report rows", str(path))
    return cast("list[Row]", rows)


def changes(rows: Sequence[Row], baseline: Sequence[Row]) -> Iterator[Change]:
    """Every figure that differs between a row and the baseline's row of the same case."""
    before = {identity(row): row for row in baseline}
    for row in rows:
        if old := before.get(identity(row)):
            for figure, then, now, sign in _figures(old, row):
                if then != now:
                    worse_by = 100 * sign * (now - then) / abs(then) if then else 100.0 * sign * now
                    yield Change(name(row), figure, then, now, worse_by)


def identity(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in IDENTITY)


def name(row: Row) -> str:
    """The case, for people."""
    tokens = f" {row['num_tokens']}" if row["phase"] == "mixed" else ""
    heads = f"{row['n_q']}/{row['n_kv']}/{row['head_dim']}"
    return f"{row['chip']} {row['phase']}{tokens} {heads} page {row['page']} {row['kv_dtype']}"


def _figures(old: Row, new: Row) -> Iterator[tuple[str, float, float, int]]:
    """Figures that both rows have: name, before, now, and 1 where less is better, else -1."""
    for keys, sign in ((LESS_IS_BETTER, 1), (MORE_IS_BETTER, -1)):
        for key in keys:
            if old.get(key) is not None and new.get(key) is not None:
                yield key, old[key], new[key], sign
    for key in BY_CONTEXT:
        for context, share in new.get(key, {}).items():
            if context in old.get(key, {}):
                yield f"{key} at {context}", old[key][context], share, -1
