"""One row of the report per compiled case: the JSON contract.

Owns the keys of a row and how figures become them. Every figure is a static prediction: nothing
was executed.
"""

from __future__ import annotations

from typing import Any

from kernels.analysis.prediction import Prediction, StepFacts, predict, predict_step
from kernels.chips import CHIPS
from server.cli.kernel_lab.launch import Compiled

Row = dict[str, Any]

# What makes two rows of two reports the same case.
IDENTITY = (
    "kernel",
    "chip",
    "n_q",
    "n_kv",
    "head_dim",
    "page",
    "kv_dtype",
    "q_dtype",
    "phase",
    "num_tokens",
)


def row_of(compiled: Compiled) -> Row:
    """The figures of one case.

    `roofline_share` is by context length, for a decode step the share of what HBM allows, for a
    mixed one the share of the nearer of both rooflines, edges included. `scheduled_*` are the same
    figures with the latency of every result (`kernels.analysis.schedule`).
    """
    job, schedule, said = compiled.job, compiled.schedule, compiled.said
    case, chip = job.case, CHIPS[job.chip]
    figures = predict(schedule, compiled.facts, chip)
    return {
        "kernel": case.kernel,
        "chip": job.chip,
        "n_q": case.n_q,
        "n_kv": case.n_kv,
        "head_dim": case.head_dim,
        "page": case.page,
        "kv_dtype": case.kv_dtype,
        "q_dtype": case.q_dtype,
        "phase": case.phase,
        "num_tokens": case.num_tokens,
        "latent": case.is_latent,
        "cycles_per_kv_token_head": _short(figures.cycles),
        "all_in_cycles_per_kv_token_head": _short(figures.all_in_cycles),
        "scheduled_cycles_per_kv_token_head": _short(figures.scheduled_cycles),
        "hbm_cycles": _short(figures.hbm_cycles),
        "flops_per_byte": _short(_flops_per_byte(compiled)),
        **_shares(compiled, figures),
        "vmem_bytes": schedule.memory.get("vmem"),
        "vmem_estimate_bytes": said["vmem_estimate"],
        "smem_bytes": schedule.memory.get("smem"),
        "code_bytes": figures.code_bytes,
        "num_bundles": schedule.num_bundles,
        "lower_s": said["lower_s"],
        "compile_s": said["compile_s"],
        "prologue_us": _short(figures.prologue_us),
        "spills": figures.spills,
        "slots": {name: round(share, 3) for name, share in figures.slot_shares.items()},
        "blocks": said["blocks"],
        "jax": said["jax"],
        "libtpu": said["libtpu"],
    }


def _shares(compiled: Compiled, figures: Prediction) -> Row:
    """Shares of the rooflines: of the steady loop, and by context."""
    shares: Row = {
        "roofline_share": _by_context(figures.roofline_share),
        "scheduled_roofline_share": _by_context(figures.scheduled_share),
        "useful_flop_share": _short(figures.useful_flop_share),
        "scheduled_useful_flop_share": _short(figures.scheduled_flop_share),
    }
    if not compiled.said["steps"]:
        return shares
    chip = CHIPS[compiled.job.chip]
    steps = {
        context: predict_step(compiled.schedule, compiled.facts, StepFacts(**facts), chip)
        for context, facts in compiled.said["steps"].items()
    }
    for prefix, which in (("", "final"), ("scheduled_", "scheduled")):
        found = {context: step[which] for context, step in steps.items() if which in step}
        shares[f"{prefix}roofline_share"] = {
            context: _short(step.roofline_share) for context, step in found.items()
        }
        shares[f"{prefix}useful_flop_share_with_edges"] = {
            context: _short(step.useful_flop_share) for context, step in found.items()
        }
    return shares


def _flops_per_byte(compiled: Compiled) -> float:
    """Useful FLOP per HBM byte: of a pass, or of a mixed step behind 4,096 positions."""
    facts, steps = compiled.facts, compiled.said["steps"]
    if steps:
        return steps["4096"]["useful_flops"] / steps["4096"]["hbm_bytes"]
    return facts.useful_flops / (facts.token_heads * facts.kv_token_head_bytes)


def _by_context(shares: dict[int, float]) -> dict[str, float | None]:
    return {str(context): _short(share) for context, share in shares.items()}


def _short(value: float | None) -> float | None:
    """Four significant digits: more would pretend."""
    return None if value is None else float(f"{value:.4g}")
