"""Which blocks a kernel is compiled with: explicit ones, tuned ones, or the kernel's own choice.

Owns the table of tuned blocks (`tuned_blocks.json`, written by `tpu-engine kernels tune`) and its
lookup. What a block means and whether it fits is the kernels' business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from kernels.attention.geometry import Geometry, Scoring
from kernels.attention.pallas import chunk_blocks, decode_blocks
from kernels.attention.pallas.chunk_blocks import ChunkBlocks
from kernels.attention.pallas.decode_blocks import DecodeBlocks
from kernels.chips import Chip

TABLE = "tuned_blocks.json"


def decode_blocks_for(
    geometry: Geometry,
    scoring: Scoring,
    chip: Chip,
    *,
    decode_queries: int = 1,
    explicit: DecodeBlocks | None = None,
) -> DecodeBlocks:
    """Explicit over tuned over heuristic; raises `ValueError` if explicit ones don't fit."""
    if explicit is not None:
        decode_blocks.check_blocks(geometry, scoring, explicit, chip)
        return explicit
    tuned = tuned_blocks("decode_attention", geometry, chip.name)
    if tuned is not None and decode_queries == 1:
        found = DecodeBlocks(**tuned)
        # Scoring (sinks) can need more than what was tuned.
        needed = decode_blocks.vmem_bytes(geometry, scoring, found)
        if needed + decode_blocks.VMEM_RESERVE <= chip.vmem_bytes:
            return found
    return decode_blocks.default_blocks(geometry, scoring, chip, decode_queries=decode_queries)


def chunk_blocks_for(
    geometry: Geometry, scoring: Scoring, chip: Chip, *, explicit: ChunkBlocks | None = None
) -> ChunkBlocks:
    """Explicit over tuned over heuristic; raises `ValueError` if explicit ones don't fit."""
    if explicit is not None:
        chunk_blocks.check_blocks(geometry, scoring, explicit, chip)
        return explicit
    tuned = tuned_blocks("chunk_attention", geometry, chip.name)
    if tuned is not None:
        found = ChunkBlocks(**tuned)
        if chunk_blocks.vmem_bytes(geometry, scoring, found) <= chunk_blocks.usable_vmem(chip):
            return found
    return chunk_blocks.default_blocks(geometry, scoring, chip)


def tuned_blocks(kernel: str, geometry: Geometry, chip: str) -> Mapping[str, Any] | None:
    """The table's blocks for exactly this kernel, geometry and chip."""
    return _table().get((kernel, chip, geometry))


def entries(text: str) -> Iterator[tuple[str, str, Geometry, dict[str, Any]]]:
    """Kernel, chip, geometry and blocks of every entry of a table's text."""
    rows: list[dict[str, Any]] = json.loads(text)
    for row in rows:
        yield row["kernel"], row["chip"], Geometry(**row["geometry"]), row["blocks"]


def entry(kernel: str, chip: str, geometry: Geometry, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """One entry, as it stands in the table."""
    return {"kernel": kernel, "chip": chip, "geometry": asdict(geometry), "blocks": dict(blocks)}


def table_text() -> str:
    """The table as it is shipped."""
    return files("kernels.attention.pallas").joinpath(TABLE).read_text()


@cache
def _table() -> dict[tuple[str, str, Geometry], dict[str, Any]]:
    return {(kernel, chip, geo): blocks for kernel, chip, geo, blocks in entries(table_text())}
