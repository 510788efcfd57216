"""`tpu-engine plan`: which shapes are compiled, what they are for and what they cost.

Owns the table, the JSON and the plan file that are written. Loads no JAX: a plan is derived from
a model's configuration alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from buckets.device_profile import DeviceProfile, profile_from_yaml
from buckets.plan import InvalidPlan, PlanLimits, purpose
from buckets.plan_file import PlanFile, plan_file_from_yaml, plan_to_yaml
from server.cli import plan_memory
from server.cli.flags import with_flags
from server.cli.plan_swap import swap
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.plan_padding import Padding, predict_padding

app = typer.Typer(no_args_is_help=True, help="Show, check and swap plans of compiled shapes.")


@dataclass(frozen=True, slots=True)
class ShowFlags:
    """What to show.

    Attributes:
        file: a plan file to show as it is, without a model's limits to check it against.
        profile: file with a device profile; the plan file's own if not given.
        yaml: write the plan as a plan file instead of a table, to edit it.
        json: write everything as JSON instead of a table.
    """

    file: str | None = None
    profile: str | None = None
    yaml: bool = False
    json: bool = False


def show(config: EngineConfig | None, flags: ShowFlags | None) -> None:
    """Show the plan that a model and its options get, or that a plan file holds."""
    flags = ShowFlags() if flags is None else flags
    if flags.yaml and flags.json:
        raise InvalidConfig("yaml", "off where --json is on", True)
    content = _content(config, flags)
    profile = _profile(flags.profile) if flags.profile else content.profile
    if flags.yaml:
        typer.echo(plan_to_yaml(content.plan, profile), nl=False)
        return
    padding = predict_padding(content.plan, None if config is None else config.max_chunk)
    rows = plan_rows(PlanFile(content.plan, profile), padding)
    if flags.json:
        target = None if profile is None else asdict(profile.target)
        typer.echo(json.dumps({"schema_version": 1, "profile": target, "shapes": rows}, indent=2))
        return
    Console(soft_wrap=True).print(_table(rows))
    typer.echo(_footer(rows, profile))


app.command("show")(with_flags(EngineConfig, ShowFlags, optional=(EngineConfig, ShowFlags))(show))
app.command("memory")(with_flags(*plan_memory.OPTIONS, argument="model")(plan_memory.memory))
app.command("swap")(swap)


def plan_rows(content: PlanFile, padding: dict[Any, Padding]) -> list[dict[str, Any]]:
    """One row per shape; what nobody knows is None."""
    rows: list[dict[str, Any]] = []
    for shape in content.plan.shapes:
        predicted = padding.get(shape)
        known = {} if content.profile is None else content.profile.of(shape).known()
        facts = ("compile_s", "hbm_bytes", "code_bytes", "estimated_step_s", "roofline_step_s")
        rows.append(
            asdict(shape)
            | {
                "purpose": purpose(shape),
                "compiler_options": dict(content.plan.compiler_options(shape)),
                "predicted_use": None if predicted is None else round(predicted.share, 4),
                "predicted_padding": None if predicted is None else round(predicted.mean, 4),
                "worst_padding": None if predicted is None else round(predicted.worst, 4),
            }
            | {name: known.get(name) for name in (*facts, "measured_step_s")}
        )
    return rows


def _content(config: EngineConfig | None, flags: ShowFlags) -> PlanFile:
    if config is not None:
        if flags.file is not None:
            raise InvalidConfig("file", "given without a model (--plan goes with one)", flags.file)
        from tpu_engine.plans import open_plan

        return open_plan(config, _limits(config))
    if flags.file is None:
        raise InvalidConfig("model", "given, or --file with a plan file", None)
    return _parsed("file", flags.file, plan_file_from_yaml)


def _limits(config: EngineConfig) -> PlanLimits:
    from tpu_engine.derive import derive, plan_limits
    from tpu_engine.weights.open_model import describe_model

    # Of what is derived only the length matters here, and that is the same on every platform.
    platform = "tpu" if config.attention == "pallas" else "cpu"
    return plan_limits(derive(config, describe_model(config.model).config, platform))


def _profile(path: str) -> DeviceProfile:
    return _parsed("profile", path, profile_from_yaml)


def _parsed(option: str, name: str, parse: Any) -> Any:
    path = Path(name).expanduser()
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(option, "a readable file", f"{path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(option, "a text file", f"{path} ({error.reason})") from error
    except InvalidPlan as error:
        raise InvalidConfig(option, "a valid one", f"{path} ({error})") from error


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", "rows", "logits", "use", "padding", "worst", "HBM", "compile", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("for", no_wrap=True)
    for row in rows:
        step_s = row["measured_step_s"] or row["estimated_step_s"]
        hbm, compile_s = row["hbm_bytes"], row["compile_s"]
        table.add_row(
            str(row["num_tokens"]),
            str(row["num_seqs"]),
            str(row["num_logit_rows"]),
            _percent(row["predicted_use"], "never"),
            _percent(row["predicted_padding"], "-"),
            _percent(row["worst_padding"], "-"),
            "unknown" if hbm is None else f"{hbm / 2**30:.2f} GiB",
            "unknown" if compile_s is None else f"{compile_s:.1f} s",
            "unknown" if step_s is None else f"{step_s * 1e3:.2f} ms",
            row["purpose"] if row["variant"] == "full" else f"{row['purpose']} {row['variant']}",
        )
    return table


def _percent(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value * 100:.0f} %"


def _footer(rows: list[dict[str, Any]], profile: DeviceProfile | None) -> str:
    lines = [
        f"{len(rows)} shapes, {rows[0]['pages_per_seq']} pages per sequence; use and padding as "
        "the scheduler chooses, over loads spread evenly on a logarithmic scale"
    ]
    seconds = [row["compile_s"] for row in rows if row["compile_s"] is not None]
    if seconds:
        lines.append(f"{sum(seconds):.0f} s to compile {len(seconds)} of them, one after another")
    if profile is None:
        lines.append("no device profile: HBM, compile and step times are unknown")
    else:
        target = profile.target
        lines.append(f"profile: {target.model}, {target.chip}, {target.mesh}, {target.versions}")
    return "\n".join(lines)
