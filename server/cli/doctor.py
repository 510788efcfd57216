"""`tpu-engine doctor`: the first hour on new hardware in one command.

Owns the sections of the examination and the report. What is examined is the engine itself: a
section that fails is named, and the next one runs all the same.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from server.cli.startup import StartupDisplay, with_cache
from server.version import package_version
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig

if TYPE_CHECKING:
    from tpu_engine.build import BuiltEngine
    from tpu_engine.target import StepTarget

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy")


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """What to examine, and where to put the report.

    Attributes:
        report: folder for report.md, report.json and profile.yaml.
        runs: timed runs of each shape; the median is reported.
    """

    report: str = "doctor-report"
    runs: int = 5

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise InvalidConfig("runs", "at least 1", self.runs)


OPTIONS = (DoctorFlags, EngineConfig)


@dataclass(slots=True)
class Section:
    """One part of the examination: what was found, and why it failed ("" if it didn't)."""

    title: str
    lines: list[str] = field(default_factory=list[str])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""


def doctor(flags: DoctorFlags, config: EngineConfig) -> None:
    """Examine devices, kernels, programs and speed, and write a report to send to a colleague."""
    folder = Path(flags.report)
    folder.mkdir(parents=True, exist_ok=True)
    with StartupDisplay() as display:
        config = with_cache(config, display)
        examination = Examination(config, flags, display)
        sections = [_examine(title, part, display) for title, part in examination.parts()]
    (folder / "report.md").write_text(_markdown(config, sections))
    content = {
        "version": package_version(),
        "options": asdict(config),
        "sections": [asdict(section) for section in sections],
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    if examination.profile_text:
        (folder / "profile.yaml").write_text(examination.profile_text)
    failed = [section.title for section in sections if section.failure]
    typer.echo(f"report: {folder / 'report.md'}")
    if failed:
        typer.echo(f"not healthy: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
    typer.echo("healthy")


def _examine(title: str, part: Callable[[Section], None], display: StartupDisplay) -> Section:
    section = Section(title)
    started_s = time.monotonic()
    try:
        part(section)
    except (EngineError, RuntimeError, ValueError, TypeError) as error:
        # JAX and its devices raise RuntimeErrors; shapes that don't fit are ValueErrors.
        section.failure = f"{type(error).__name__}: {error}"
    verdict = f"FAILED: {section.failure}" if section.failure else "ok"
    display.say(f"{title}: {verdict} ({time.monotonic() - started_s:.1f} s)")
    for line in section.lines:
        display.say(f"    {line}")
    return section


class Examination:
    """The parts of one examination; later ones use what earlier ones found."""

    def __init__(self, config: EngineConfig, flags: DoctorFlags, display: StartupDisplay) -> None:
        self.profile_text = ""
        self._config = config
        self._flags = flags
        self._display = display
        self._built: BuiltEngine | None = None
        self._target: StepTarget | None = None

    def parts(self) -> list[tuple[str, Callable[[Section], None]]]:
        return [
            ("machine", self.machine),
            ("memory", self.memory),
            ("kernels", self.kernels),
            ("programs", self.programs),
            ("speed", self.speed),
        ]

    def machine(self, section: Section) -> None:
        """Versions and devices."""
        from tpu_engine.topology import target_devices

        installed = {d.name: d.version for d in metadata.distributions() if d.name in _PACKAGES}
        section.facts["versions"] = {"python": platform.python_version(), **installed}
        section.lines.append(
            ", ".join(f"{name} {number}" for name, number in section.facts["versions"].items())
        )
        devices = target_devices(None)
        section.lines.append(f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} CPUs")
        section.facts["devices"] = [str(device) for device in devices]
        stats: list[dict[str, int]] = [device.memory_stats() or {} for device in devices]
        limits = [one["bytes_limit"] for one in stats if "bytes_limit" in one]
        if limits:
            section.lines.append(f"memory a device offers: {min(limits) / 2**30:.2f} GiB")
        section.facts["bytes_limits"] = limits

    def memory(self, section: Section) -> None:
        """The memory plan, before anything is allocated."""
        from tpu_engine.prepare import memory_plan_of, require_memory

        target = self._prepared()
        plan = memory_plan_of(target, {})
        parts = {"capacity": plan.capacity_bytes, "weights": plan.weight_bytes}
        parts |= {"pages": plan.kv_bytes, "free": plan.free_bytes}
        section.facts["bytes"] = parts
        section.lines.append(
            ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items())
        )
        require_memory(plan, target.devices[0])

    def kernels(self, section: Section) -> None:
        """Every device op against its reference."""
        from tpu_engine.kernel_check import check_kernels

        target = self._prepared()
        if target.choice.attention == "xla":
            section.lines.append(
                "the Pallas kernels need a TPU (or --attention pallas-interpret): "
                "the XLA path is checked instead"
            )
        results = list(check_kernels(target))
        section.facts["results"] = [asdict(result) for result in results]
        for result in results:
            verdict = "right" if result.is_right else "WRONG"
            section.lines.append(
                f"{result.name}: {verdict}, off by {result.difference:.2g} "
                f"(at most {result.tolerance:.2g})"
            )
        wrong = [result.name for result in results if not result.is_right]
        if wrong:
            raise EngineError(f"differs from its reference: {', '.join(wrong)}")

    def programs(self, section: Section) -> None:
        """The compile cache filled or loaded, and the canary run through every program."""
        from tpu_engine.build import build_engine

        self._built = build_engine(self._config, self._display.take)
        records = self._built.executables.records
        for source in ("loaded", "compiled"):
            some = [record for record in records if record.source == source]
            if some:
                seconds = sum(record.seconds for record in some)
                section.lines.append(f"{len(some)} {source} in {seconds:.1f} s")
        section.lines += [f"({r.shape}): {r.note}" for r in records if r.note]
        section.facts["programs"] = [
            {"shape": str(r.shape), "source": r.source, "seconds": r.seconds, "note": r.note}
            for r in records
        ]
        said = "ran through every program" if self._config.canary else "is switched off"
        section.lines.append(f"the canary {said}")

    def speed(self, section: Section) -> None:
        """Every shape timed, beside what was estimated."""
        from server.cli.doctor_speed import measured_profile, speed_lines

        if self._built is None:
            raise EngineError("no engine: see programs")
        profile = measured_profile(self._built, self._prepared(), self._flags.runs)
        from buckets.device_profile import profile_to_yaml

        self.profile_text = profile_to_yaml(profile)
        section.facts["profile"] = profile.to_json()
        section.lines += speed_lines(profile)

    def _prepared(self) -> StepTarget:
        from tpu_engine.prepare import prepare
        from tpu_engine.topology import target_devices
        from tpu_engine.weights.open_model import describe_model

        if self._target is None:
            model = describe_model(self._config.model)
            devices, num_ids = target_devices(None), model.num_token_ids
            self._target = prepare(self._config, model.config, num_ids, devices)
        return self._target


def _markdown(config: EngineConfig, sections: list[Section]) -> str:
    lines = [f"# tpu-engine doctor, {package_version()}", "", f"Model: `{config.model}`", ""]
    for section in sections:
        lines += [f"## {section.title}: {'FAILED' if section.failure else 'ok'}", ""]
        lines += [f"- {section.failure}"] if section.failure else []
        lines += [f"- {line}" for line in section.lines] + [""]
    return "\n".join(lines)
