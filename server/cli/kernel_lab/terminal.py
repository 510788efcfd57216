"""Reports and schedules as tables in the terminal.

Owns columns and units. Knows nothing of how a figure came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.analysis.schedule import KernelSchedule
from server.cli.kernel_lab.compare import name
from server.cli.kernel_lab.rows import Row

SHOWN_CONTEXTS = ("130", "256", "257", "512", "1024", "2048", "4096", "8192")
WIDTH = 150  # columns that the tables need; a narrower terminal wraps their lines
EDGE_CONTEXTS = ("0", "4096")
SHOWN_SLOTS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "SALU")

STATIC = (
    "Static predictions from the compiler's schedule: nothing was executed. 100 % means that "
    "neither slots nor units stand between the kernel and the roofline."
)
LATENCIES = (
    "c: cycles per KV token and head (all: with every optional body; lat: with the latency of "
    "every result). HBM: cycles its bytes take. FLOP: useful share of the matrix units' peak, "
    "steady; +n: of a whole chunk behind n positions, edges included."
)


def wide_console() -> Console:
    """A console that cuts no cell."""
    console = Console()
    return console if console.width >= WIDTH else Console(width=WIDTH)


def report_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Speed first, then size."""
    speed = _table("Predicted share of the roofline (%), by context", LATENCIES)
    speed.add_column("case")
    for title in (
        "c",
        "all",
        "lat",
        "HBM",
        *SHOWN_CONTEXTS,
        "FLOP",
        *(f"+{n}" for n in EDGE_CONTEXTS),
    ):
        speed.add_column(title, justify="right")
    for row in rows:
        speed.add_row(
            name(row),
            *(_number(row[f"{part}cycles_per_kv_token_head"]) for part in ("", "all_in_")),
            _number(row["scheduled_cycles_per_kv_token_head"]),
            _number(row["hbm_cycles"]),
            *(_percent(row["roofline_share"].get(context)) for context in SHOWN_CONTEXTS),
            _percent(row["useful_flop_share"]),
            *(_percent(_edges(row, context)) for context in EDGE_CONTEXTS),
        )
    yield speed
    size = _table("Slots used in the hot loop (%), and what the kernel takes", STATIC)
    size.add_column("case")
    for title in (*SHOWN_SLOTS, "spills", "VMEM MiB", "code KiB", "compile s", "prologue µs"):
        size.add_column(title, justify="right")
    for row in rows:
        size.add_row(
            name(row),
            *(_percent(row["slots"][slot]) for slot in SHOWN_SLOTS),
            str(row["spills"]),
            f"{(row['vmem_bytes'] or 0) / 2**20:.1f}",
            f"{row['code_bytes'] / 2**10:.0f}",
            f"{row['compile_s']:.1f}",
            _number(row["prologue_us"]),
        )
    yield size


def schedule_table(schedule: KernelSchedule) -> Table:
    """One kernel's loops, whatever kernel it is."""
    chips = "/".join(schedule.machine.chips)
    memory = ", ".join(f"{space} {size:,} B" for space, size in schedule.memory.items())
    table = _table(f"{schedule.name}: {schedule.num_bundles} bundles, {chips}", memory)
    table.add_column("loop")
    for title in (
        "bundles",
        "steady",
        "longest",
        "latency",
        "MXU",
        "XLU",
        "waits",
        "DMAs",
        "spills",
    ):
        table.add_column(title, justify="right")
    for slot in SHOWN_SLOTS:
        table.add_column(f"{slot} %", justify="right")
    for loop in schedule.loops:
        hot = " *" if loop is schedule.hot else ""
        table.add_row(
            "  " * loop.depth + loop.path + hot,
            str(loop.all_in.bundles),
            str(loop.steady.estimate),
            str(loop.longest.estimate),
            "" if loop.scheduled is None else str(loop.scheduled),
            str(loop.all_in.units.mxu_cycles),
            str(loop.all_in.units.xlu_cycles),
            str(loop.num_waits),
            str(len(loop.transfers)),
            str(loop.spills),
            *(_percent(loop.slot_shares[slot]) for slot in SHOWN_SLOTS),
        )
    return table


def _edges(row: Row, context: str) -> float | None:
    """A mixed step's share of the matrix units' peak, edges included."""
    return row.get("useful_flop_share_with_edges", {}).get(context)


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
