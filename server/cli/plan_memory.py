"""`tpu-engine plan memory`: where a device's memory will go, before anything is put there.

Owns the table and the JSON. The arithmetic is the server's own: `serve` refuses what this refuses.
"""

from __future__ import annotations

import json as json_format
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from server.cli.startup import StartupDisplay
from server.cli.tpu_compiler import warm_up_variables
from server.cli.warmup import WarmupFlags, open_warm_up
from tpu_engine.config import EngineConfig

if TYPE_CHECKING:
    from tpu_engine.memory_plan import MemoryPlan

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryFlags:
    """Which devices to plan for.

    Attributes:
        topology: devices such as v6e:2x4, none of which need be here; this machine's own (cpu) if
            not given.
        mesh: axes and sizes, as tensor=8; as many devices on `tensor` as divide the model if
            neither this nor tensor_parallel is given.
        json: write JSON instead of a table.
    """

    topology: str | None = None
    mesh: str | None = None
    json: bool = False


OPTIONS = (MemoryFlags, EngineConfig)


def memory(flags: MemoryFlags, config: EngineConfig) -> None:
    """Show what fits into a device's memory: weights, pages, programs; exit code 1 if not all."""
    os.environ.update(warm_up_variables(os.environ))  # before JAX looks
    from tpu_engine.prepare import memory_plan_of

    with StartupDisplay() as display:
        warm_up, target = open_warm_up(config, WarmupFlags(flags.topology, flags.mesh), display)
    planned = memory_plan_of(target, warm_up.stored())
    if flags.json:
        typer.echo(json_format.dumps(content_of(planned), indent=1))
    else:
        console = Console(soft_wrap=True, highlight=False)
        console.print(_shapes_table(planned))
        for line in lines_of(planned):
            console.print(line)
    raise typer.Exit(0 if planned.fits else 1)


def content_of(planned: MemoryPlan) -> dict[str, Any]:
    """Everything, in bytes of one device."""
    totals = ("kv_bytes", "temp_bytes", "code_bytes", "free_bytes", "fits")
    content = asdict(planned) | {name: getattr(planned, name) for name in totals}
    return {"schema_version": 1, **content}


def lines_of(planned: MemoryPlan) -> list[str]:
    """The sum, part by part, and the verdict."""
    parts = {
        "weights": planned.weight_bytes,
        f"{planned.num_pages:,} pages": planned.kv_bytes,
        "temporaries of the largest step": planned.temp_bytes,
        f"code of {len(planned.shapes)} programs": planned.code_bytes,
        "reserve (runtime, fragmentation)": planned.reserve_bytes,
        "free": planned.free_bytes,
    }
    lines = [f"{name:<34}{size / _MIB:>10,.0f} MiB" for name, size in parts.items()]
    lines.append(f"{'one device':<34}{planned.capacity_bytes / _MIB:>10,.0f} MiB")
    unknown = sum(not shape.is_compiled for shape in planned.shapes)
    if unknown:
        lines.append(
            f"{unknown} of {len(planned.shapes)} shapes are not in the cache: theirs are allowances"
        )
    lines.append("it fits" if planned.fits else f"it does not fit: {planned.advice}")
    return lines


def _shapes_table(planned: MemoryPlan) -> Table:
    table = Table(title="per shape, MiB of one device")
    for name in ("tokens", "seqs", "temporaries", "code", "source", "verdict"):
        table.add_column(name, justify="left" if name in ("source", "verdict") else "right")
    for one in planned.shapes:
        table.add_row(
            str(one.shape.num_tokens),
            str(one.shape.num_seqs),
            f"{one.temp_bytes / _MIB:,.1f}",
            f"{one.code_bytes / _MIB:,.1f}",
            "compiler" if one.is_compiled else "allowance",
            "fits" if one.fits else "does not fit",
        )
    return table
