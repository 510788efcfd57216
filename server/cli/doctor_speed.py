"""The doctor's stopwatch: every shape of a built engine, and the device profile that comes of it.

Owns the join of measured and predicted seconds. Knows no flags and no report.
"""

from __future__ import annotations

from importlib import metadata

from buckets.device_profile import DeviceProfile, ProfileTarget, ShapeProfile
from buckets.shape import StepShape
from tpu_engine.build import BuiltEngine
from tpu_engine.step_timing import full_plan, median_step_s
from tpu_engine.target import StepTarget
from tpu_engine.warm_up import roofline_step_s


def measured_profile(built: BuiltEngine, target: StepTarget, num_runs: int) -> DeviceProfile:
    """Times every shape of the engine's plan; facts of the compiler where they are known."""
    assert built.config.num_pages is not None
    facts = {record.shape: record.facts for record in built.executables.records}
    shapes: dict[StepShape, ShapeProfile] = {}
    for shape in built.plan.shapes:
        plan = full_plan(shape, built.config.num_pages, built.config.page_size)
        known = facts.get(shape)
        profile = ShapeProfile(
            roofline_step_s=roofline_step_s(target, shape),
            measured_step_s=median_step_s(built.runner, plan, num_runs),
            num_measured=num_runs,
        )
        if known is not None:
            compiled = ShapeProfile(
                compile_s=known.compile_s,
                hbm_bytes=known.hbm_bytes,
                temp_bytes=known.temp_bytes,
                code_bytes=known.code_bytes,
                estimated_step_s=known.estimated_step_s,
            )
            profile = compiled.updated(profile)
        shapes[shape] = profile
    names = ("jax", "jaxlib", "libtpu")
    installed = {d.name: d.version for d in metadata.distributions() if d.name in names}
    kind = target.devices[0].device_kind
    mesh = ", ".join(f"{axis}={size}" for axis, size in target.mesh_axes.items())
    versions = ", ".join(f"{name} {number}" for name, number in sorted(installed.items()))
    return DeviceProfile(ProfileTarget(built.model.name, kind, mesh, versions), shapes)


def speed_lines(profile: DeviceProfile) -> list[str]:
    """One line per shape: measured milliseconds, and the roofline's where there is one."""
    lines: list[str] = []
    for shape, known in sorted(profile.shapes.items()):
        assert known.measured_step_s is not None
        line = f"tokens={shape.num_tokens} seqs={shape.num_seqs}: {1e3 * known.measured_step_s:.2f}"
        line += " ms"
        if known.roofline_step_s:
            share = known.roofline_step_s / known.measured_step_s
            line += f", {share:.0%} of the roofline ({1e3 * known.roofline_step_s:.2f} ms)"
        lines.append(line)
    return lines
