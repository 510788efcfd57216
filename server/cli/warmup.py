"""`tpu-engine warmup`: compiles every program of a configuration before a server needs it.

Owns flags, display and the JSON report. Which programs there are is decided as at `serve`, so the
options that decide them must be the same there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from server.cli.bench import writable
from server.cli.startup import StartupDisplay, with_cache
from server.cli.tpu_compiler import warm_up_variables
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from tpu_engine.target import StepTarget
    from tpu_engine.warm_up import WarmUp

# Largest resident size seen of a worker (Llama-3.1-8B on eight v6e), rounded up.
JOB_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class WarmupFlags:
    """What to compile for, and how.

    Attributes:
        topology: devices to compile for, such as v6e:2x4, none of which need be here; this
            machine's own (cpu) if not given.
        mesh: axes and sizes, as tensor=8; as many devices on `tensor` as divide the model if
            neither this nor tensor_parallel is given.
        cache: folder for the programs; the same as compile_cache.
        jobs: compiler processes at a time; as processors and free memory allow if not given.
        json: file for the report.
    """

    topology: str | None = None
    mesh: str | None = None
    cache: str | None = None
    jobs: int | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise InvalidConfig("jobs", "at least 1", self.jobs)


OPTIONS = (WarmupFlags, EngineConfig)


def warmup(flags: WarmupFlags, config: EngineConfig) -> None:
    """Compile all programs of a server into its cache; needs neither weights nor TPU."""
    os.environ.update(warm_up_variables(os.environ))  # before JAX looks
    from tpu_engine.warm_up import keep_profile

    started_s = time.monotonic()
    report_file = None if flags.json is None else writable(Path(flags.json))
    with StartupDisplay() as display:
        warm_up, target = open_warm_up(config, flags, display)
        warm_up.warm_state()
        stored = warm_up.stored()
        rows = {shape: _row(target, shape, "reused", facts) for shape, facts in stored.items()}
        missing = tuple(shape for shape in target.plan.shapes if shape not in stored)
        jobs = num_jobs(flags.jobs, len(missing))
        for shape, row in _compile(warm_up, target, missing, jobs, display):
            rows[shape] = row
            if report_file is not None:  # after each: what was done is told even if we are killed
                _write(report_file, _report(rows.values(), started_s))
        report = _report(rows.values(), started_s)
        if report_file is not None:
            _write(report_file, report | _conditions(warm_up, target, jobs))
        if said := keep_profile(target, warm_up.stored()):
            display.say(said)
    _tell(report, len(target.plan.shapes), target.config)
    raise typer.Exit(0 if report["built"] + report["reused"] == len(target.plan.shapes) else 1)


def open_warm_up(
    config: EngineConfig, flags: WarmupFlags, display: StartupDisplay
) -> tuple[WarmUp, StepTarget]:
    """Decides what to compile and says it; raises `InvalidConfig` or `InvalidModel`."""
    from tpu_engine.topology import target_devices
    from tpu_engine.warm_up import WarmUp, with_mesh
    from tpu_engine.weights.open_model import describe_model

    model = describe_model(config.model)
    if model.note:
        display.say(f"warning: {model.note}")
    if flags.cache is not None:
        if config.compile_cache not in (None, flags.cache):
            raise InvalidConfig("cache", f"{config.compile_cache}, as compile_cache", flags.cache)
        config = replace(config, compile_cache=flags.cache)
    config = with_cache(config, display)
    devices = target_devices(flags.topology)
    config = with_mesh(config, model.config, flags.mesh, len(devices))
    warm_up = WarmUp(config, model.config, model.num_token_ids, flags.topology)
    target, _ = warm_up.open()
    display.say(
        f"{model.name} for {config.tensor_parallel} of {len(devices)} x {devices[0].device_kind}, "
        f"{target.config.num_pages} pages, {len(target.plan.shapes)} shapes: "
        f"serve it with --tensor-parallel {config.tensor_parallel} and the same options"
    )
    return replace(warm_up, plan=target.plan), target


def num_jobs(wanted: int | None, num_missing: int) -> int:
    """Processes that fit: as many as wanted, at most one per shape and `JOB_BYTES` of memory."""
    room = max(1, _available_bytes() // JOB_BYTES)
    most = wanted if wanted is not None else os.cpu_count() or 1
    return max(1, min(most, room, num_missing))


def _compile(
    warm_up: WarmUp,
    target: StepTarget,
    missing: tuple[Any, ...],
    jobs: int,
    display: StartupDisplay,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    if not missing:
        return
    total, started_s = len(missing), time.monotonic()
    display.report("compile", 0, total, f"{jobs} at a time")
    for done, one in enumerate(warm_up.run(missing, jobs), start=1):
        left_s = (time.monotonic() - started_s) / done * (total - done)
        size = f"tokens={one.shape.num_tokens} seqs={one.shape.num_seqs}"
        said = f"{size} {one.outcome} in {one.seconds:.1f} s, {left_s:.0f} s left"
        display.report("compile", done, total, said)
        if one.note:
            display.say(f"({one.shape}) {one.outcome}: {one.note}")
        yield one.shape, _row(target, one.shape, one.outcome, one.facts, one.note)


def _row(
    target: StepTarget, shape: Any, outcome: str, facts: Any, note: str = ""
) -> dict[str, Any]:
    from tpu_engine.warm_up import roofline_step_s

    row = asdict(shape)
    variant = row.pop("variant")
    row = {"shape": row, "variant": variant, "outcome": outcome, "note": note}
    row["roofline_step_s"] = roofline_step_s(target, shape)
    if facts is not None:
        row |= facts.to_json() | {"hbm_bytes": facts.hbm_bytes}
    return row


def _report(rows: Any, started_s: float) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: tuple(row["shape"].values()))
    outcomes = [row["outcome"] for row in rows]
    return {
        "shapes": [row for row in rows if row["outcome"] != "failed"],
        "total_s": round(time.monotonic() - started_s, 3),
        "built": outcomes.count("built"),
        "reused": outcomes.count("reused"),
        "failures": [row for row in rows if row["outcome"] == "failed"],
    }


def _conditions(warm_up: WarmUp, target: StepTarget, jobs: int) -> dict[str, Any]:
    from importlib import metadata

    names = ("jax", "jaxlib", "libtpu")
    installed = {dist.name: dist.version for dist in metadata.distributions() if dist.name in names}
    return {
        "topology": warm_up.topology or "cpu",
        "mesh": dict(target.mesh_axes),
        "config": asdict(target.config),
        "jobs": jobs,
        "processors": os.cpu_count(),
        "versions": installed,
    }


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def _tell(report: Mapping[str, Any], total: int, config: EngineConfig) -> None:
    built, reused = report["built"], report["reused"]
    if reused == total:
        typer.echo(f"nothing to do: {config.compile_cache} has all {total} programs")
        return
    failed = len(report["failures"])
    typer.echo(
        f"{built} built, {reused} reused, {failed} failed of {total} in {report['total_s']:.1f} s"
    )
    if failed:
        typer.echo("incomplete: run it again with the same options to continue", err=True)


def _available_bytes() -> int:
    """Memory that new processes may take without swapping."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass  # no Linux: all that is installed
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
