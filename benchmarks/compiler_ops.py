"""Ops around attention: what the compiler makes of plain JAX on a TPU, and what a kernel makes.

    python -m benchmarks.compiler_ops --chip v6e --json FILE

Decides which ops deserve a kernel. Needs libtpu, no TPU: nothing is executed. XLA's cycles are the
compiler's own estimates, loop bodies times their trip counts; a kernel's are read from its final
schedule the same way. Both are compared with what HBM and the matrix units allow.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kernels.chips import Chip, chip_named

LAYERS, KV_HEADS, WIDTH, NUM_PAGES = 32, 8, 128, 64
HIDDEN, FFN, VOCAB = 4096, 14336, 128256


@dataclass(frozen=True)
class Op:
    """One op: how it is lowered, and the least it must move (bytes) and multiply (FLOP)."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    num_bytes: float
    num_flops: float = 0.0
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """One op on one chip; `cycles` is None where the compiler tells no estimate."""

    op: str
    chip: str
    cycles: float | None
    needed_cycles: float
    share: float | None
    temporary_bytes: int


def page_ops() -> list[Op]:
    """Gather and scatter of whole pages of all layers, as offload and transfer do them."""
    from functools import partial

    from kernels.pages import gather_pages, scatter_pages

    ops: list[Op] = []
    for page_size in (16, 128):
        cache = (LAYERS, 8 * NUM_PAGES, 2, KV_HEADS, page_size, WIDTH)
        block = (LAYERS, NUM_PAGES, *cache[2:])
        moved = 2 * LAYERS * NUM_PAGES * 2 * KV_HEADS * page_size * WIDTH * 2
        pages = ((NUM_PAGES,), "int32")
        arrays = ((cache, "bfloat16"), pages)
        for backend in ("xla", "pallas"):
            name = f"pages of {page_size}, {backend}"
            gather = partial(gather_pages, backend=backend)
            ops.append(Op(f"gather {name}", gather, arrays, moved))
            scatter = partial(scatter_pages, backend=backend)
            written = (*arrays, (block, "bfloat16"))
            ops.append(Op(f"scatter {name}", scatter, written, moved, donated=(0,)))
    return ops


def matmul_ops() -> list[Op]:
    """Weights in int8, widened inside the matmul; tokens sorted by expert, one matmul each."""
    import jax

    from tpu_engine.models.layers import matmul_int8, matmul_transposed

    ops: list[Op] = []
    for tokens in (16, 256, 1024):
        x, flops = ((tokens, HIDDEN), "bfloat16"), 2.0 * tokens * HIDDEN * FFN
        ends = 2 * tokens * (HIDDEN + FFN)
        quantized = (x, ((FFN, HIDDEN), "int8"))
        ops.append(Op(f"int8 matmul, T={tokens}", matmul_int8, quantized, FFN * HIDDEN, flops))
        plain = (x, ((FFN, HIDDEN), "bfloat16"))
        function = lambda x, w: matmul_transposed(x, w, x.dtype)  # noqa: E731
        num_bytes = 2 * FFN * HIDDEN + ends
        ops.append(Op(f"bf16 matmul, T={tokens}", function, plain, num_bytes, flops))
    experts, hidden, ffn = 64, 2048, 1408
    for tokens in (64, 4096):
        arrays = (
            ((tokens, hidden), "bfloat16"),
            ((experts, hidden, ffn), "bfloat16"),
            ((experts,), "int32"),
        )
        num_bytes = 2.0 * min(tokens, experts) * hidden * ffn + 2 * tokens * (hidden + ffn)
        flops = 2.0 * tokens * hidden * ffn
        ops.append(Op(f"grouped matmul, T={tokens}", jax.lax.ragged_dot, arrays, num_bytes, flops))
    return ops


def sampling_ops() -> list[Op]:
    """Cut-offs of top-k and top-p over a whole vocabulary."""
    from functools import partial

    from kernels.sampling import sampling_cutoffs

    ops: list[Op] = []
    for rows in (8, 64, 256):
        arrays = (((rows, VOCAB), "float32"), ((rows,), "int32"), ((rows,), "float32"))
        for backend in ("xla", "pallas"):
            function = partial(sampling_cutoffs, backend=backend)
            ops.append(Op(f"cut-offs, R={rows}, {backend}", function, arrays, 4.0 * rows * VOCAB))
    return ops


def measure(op: Op, chip: Chip, device: Any, dump: Path) -> Row:
    """Compiles one op and adds up its cycles."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    place = SingleDeviceSharding(device)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)
        for shape, dtype in op.arguments
    ]
    compiled = jax.jit(op.function, donate_argnums=op.donated).lower(*arguments).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    cycles = hlo_cycles(text)
    if "tpu_custom_call" in text:
        is_cutoffs = op.name.startswith("cut-offs")
        cycles = cutoff_kernel_cycles(dump, op.arguments[0][0][0]) if is_cutoffs else None
    needed = max(op.num_bytes / chip.hbm_bytes_per_cycle, op.num_flops / chip.flops_per_cycle)
    return Row(
        op.name,
        chip.name,
        cycles,
        round(needed),
        None if not cycles else round(needed / max(cycles, needed), 3),
        memory.temp_size_in_bytes,
    )


def hlo_cycles(text: str) -> float | None:
    """The compiler's estimates of all instructions, loop bodies times their trips.

    None where an instruction that moves data (a custom fusion) carries no estimate.
    """
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
        if start:
            lines = bodies.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)

    def trips(condition: str) -> int:
        found = re.findall(r"constant\((\d+)\)", "\n".join(bodies[condition]))
        return max(map(int, found))

    def total(name: str) -> float:
        cycles = 0.0
        for line in bodies[name]:
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
            loop = re.search(r"while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if estimate:
                cycles += int(estimate[1])
            elif loop:
                cycles += trips(loop[1]) * total(loop[2])
            elif "kind=kCustom" in line:
                return float("nan")
        return cycles

    cycles = total(entry)
    return cycles if cycles > 0 else None


def cutoff_kernel_cycles(dump: Path, rows: int) -> float:
    """The sampling kernel's loops times their trips: both searches and the weighing, all rows."""
    from kernels.analysis.dump import kernel_files
    from kernels.analysis.schedule import read_schedule
    from kernels.sampling.ordered import NUM_BITS
    from kernels.sampling.pallas import ROWS, STRIDE

    files = [file for file in kernel_files(dump) if file.name.startswith("sampling_cutoffs")]
    schedule = read_schedule(files[-1])
    turns, blocks = -(-VOCAB // STRIDE), -(-rows // ROWS)
    outside = 1 if blocks > 1 else 0  # a loop over one block is no loop
    block = 0.0
    for loop in schedule.loops:
        depth, trips = loop.depth - outside, 1
        if depth == 1:
            trips = NUM_BITS if schedule.children(loop.path) else turns
        elif depth == 2:
            trips = NUM_BITS * turns
        block += loop.longest.estimate * trips
    return block * blocks


def show(rows: list[Row]) -> None:
    """One line per op."""
    table = Table(title="static estimates, nothing executed")
    for title in ("op", "cycles", "needed", "share", "temporaries MB"):
        table.add_column(title, justify="left" if title == "op" else "right")
    for row in rows:
        cycles = "not told" if row.cycles is None else f"{row.cycles:,.0f}"
        share = "" if row.share is None else f"{row.share:.0%}"
        megabytes = f"{row.temporary_bytes / 1e6:.1f}"
        table.add_row(row.op, cycles, f"{row.needed_cycles:,.0f}", share, megabytes)
    Console().print(table)


def main(
    chip_name: Annotated[str, typer.Option("--chip")] = "v6e",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    match: Annotated[str, typer.Option(help="Only ops whose name matches this pattern.")] = "",
) -> None:
    """Compile every op for one chip and say how near it comes to what the chip allows."""
    chip = chip_named(chip_name)
    with tempfile.TemporaryDirectory() as dump:
        # Before JAX is imported: the compiler reads these once.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v6e-8",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final.*",
        }
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
        ops = [*page_ops(), *matmul_ops(), *sampling_ops()]
        rows = [
            measure(op, chip, topology.devices[0], Path(dump))
            for op in ops
            if re.search(match, op.name)
        ]
    show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
