"""Block sizes found by compiling: which candidates, which is best, what goes into the table.

Owns the objective. A table entry exists only where compiling found better blocks than the kernel
would choose by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import blocks as choice
from kernels.attention.pallas import chunk_blocks, decode_blocks
from kernels.chips import CHIPS
from server.cli.kernel_lab.cases import KernelCase
from server.cli.kernel_lab.compiling import geometry_of
from server.cli.kernel_lab.launch import Compiled, Job
from server.cli.kernel_lab.rows import Row, row_of

# Of a chunk: the first of a prompt, and later ones.
CHUNK_CONTEXTS = ("0", "1024", "4096", "8192")
# A tuned entry must beat the kernel's own choice by this much to be worth keeping.
WORTHWHILE = 1.01


def candidate_jobs(cases: Sequence[KernelCase], chip: str, most: int) -> Iterator[Job]:
    """The kernel's own choice, then its most promising candidates, for every shape once."""
    seen: set[tuple[str, Geometry]] = set()
    for case in cases:
        geometry, dims = geometry_of(case)
        if (case.kernel, geometry) in seen:
            continue
        seen.add((case.kernel, geometry))
        module = decode_blocks if case.phase == "decode" else chunk_blocks
        scoring = Scoring(scale=dims.key**-0.5)
        found = module.candidate_blocks(geometry, scoring, CHIPS[chip])
        own = module.default_blocks(geometry, scoring, CHIPS[chip])
        for blocks in [own, *(one for one in found if one != own)][:most]:
            yield Job(case, chip, asdict(blocks))


def score(row: Row) -> float:
    """What tuning maximises: mean share of the roofline, by slots and with latencies alike.

    Where every share is 1, fewer cycles still leave more room for what is not seen here.
    """
    shares: list[float] = []
    for prefix in ("", "scheduled_"):
        if row["phase"] == "mixed":
            edges = cast("dict[str, float]", row[f"{prefix}useful_flop_share_with_edges"])
            shares += [edges[context] for context in CHUNK_CONTEXTS if context in edges]
        else:
            shares += cast("dict[str, float]", row[f"{prefix}roofline_share"]).values()
    headroom = row["hbm_cycles"] / row["all_in_cycles_per_kv_token_head"]
    return sum(shares) / len(shares) + 0.05 * min(2.0, headroom)


def best_blocks(compiled: Sequence[Compiled]) -> list[dict[str, Any]]:
    """Table entries: per kernel, chip and geometry the best blocks, where they are worthwhile.

    `compiled` holds the kernel's own choice first within each shape.
    """
    groups: dict[tuple[str, str, Geometry], list[Compiled]] = {}
    for one in compiled:
        geometry = Geometry(**one.said["geometry"])
        groups.setdefault((one.job.case.kernel, one.job.chip, geometry), []).append(one)
    entries: list[dict[str, Any]] = []
    for (kernel, chip, geometry), of_shape in groups.items():
        scores = [score(row_of(one)) for one in of_shape]
        best = max(range(len(scores)), key=lambda i: scores[i])
        if scores[best] > scores[0] * WORTHWHILE:
            entries.append(choice.entry(kernel, chip, geometry, of_shape[best].said["blocks"]))
    return entries


def updated_table(
    text: str, tried: Sequence[Compiled], entries: Sequence[Mapping[str, Any]]
) -> str:
    """The table with what was tried replaced by what was found; the rest stays."""
    stale = {(one.job.case.kernel, one.job.chip, Geometry(**one.said["geometry"])) for one in tried}
    kept = [
        choice.entry(kernel, chip, geometry, blocks)
        for kernel, chip, geometry, blocks in choice.entries(text)
        if (kernel, chip, geometry) not in stale
    ]
    rows = sorted([*kept, *entries], key=lambda row: json.dumps(row, sort_keys=True))
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f"[\n{lines}\n]\n" if rows else "[]\n"


def table_path() -> Path:
    """Where the shipped table lies."""
    return Path(choice.__file__).with_name(choice.TABLE)
