"""The process that compiles one case: `python -m server.cli.kernel_lab.compiling JSON`.

Prints one JSON line of facts and CPU seconds (the machine may be busy); the schedule is what the
compiler dumps, as the flags in this process' environment tell it. Whoever starts the process sets
them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from server.cli.kernel_lab.cases import LATENT_DIM, ROPE_DIM, KernelCase

if TYPE_CHECKING:
    from kernels.attention.geometry import Geometry
    from kernels.attention.pallas.facts import HeadDims


def compile_case(case: KernelCase, chip_name: str, blocks: dict[str, int] | None) -> dict[str, Any]:
    """Lowers and compiles `case` for the chip; returns what a report needs besides the schedule."""
    from kernels.attention.pallas import lowering
    from kernels.chips import chip_named

    geometry, dims = geometry_of(case)
    step = lowering.Step(case.num_tokens, case.num_seqs, dims)
    started_s = time.process_time()
    lowered = lowering.lower_kernel(case.kernel, geometry, step, chip_named(chip_name), blocks)
    lowered_s = time.process_time()
    lowered.program.compile()
    compiled_s = time.process_time()
    return {
        "lower_s": round(lowered_s - started_s, 3),
        "compile_s": round(compiled_s - lowered_s, 3),
        "blocks": lowered.blocks,
        "geometry": asdict(geometry),
        "vmem_estimate": lowered.vmem_estimate,
        "smem_estimate": lowered.smem_estimate,
        "facts": asdict(lowered.work),
        "steps": {str(context): asdict(step) for context, step in lowered.steps().items()},
        "jax": metadata.version("jax"),
        "libtpu": metadata.version("libtpu"),
    }


def geometry_of(case: KernelCase) -> tuple[Geometry, HeadDims]:
    """The case as a kernel sees it, and the lanes of a head that mean something."""
    from kernels.attention.cache_layout import kv_layout, latent_layout
    from kernels.attention.pallas.facts import HeadDims
    from kernels.chips import LANES

    common: Any = {"page_size": case.page, "dtype": case.kv_dtype, "lanes": LANES}
    if case.is_latent:
        layout = latent_layout(latent_dim=LATENT_DIM, rope_dim=ROPE_DIM, **common)
        dims = HeadDims(key=LATENT_DIM + ROPE_DIM, value=LATENT_DIM)
    else:
        layout = kv_layout(num_kv_heads=case.n_kv, head_dim=case.head_dim, **common)
        dims = HeadDims(key=case.head_dim, value=case.head_dim)
    return layout.geometry(case.n_q, case.q_dtype), dims


def main() -> None:
    """Entry point of the process."""
    given = json.loads(sys.argv[1])
    result = compile_case(KernelCase(**given["case"]), given["chip"], given["blocks"])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
