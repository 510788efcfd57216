"""The plan an engine serves with: the file that is configured, or one derived from the budgets.

Owns the reading of that file and what this engine asks of a plan beside its own checks. Which
shapes are good is `buckets`' part.
"""

from __future__ import annotations

from pathlib import Path

from buckets.plan import InvalidPlan, Plan, PlanLimits, default_plan
from buckets.plan_file import PlanFile, plan_file_from_yaml
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig

# Of the step program; every one must be able to run what the scheduler gives it.
VARIANTS = ("full",)


def choose_plan(config: EngineConfig, limits: PlanLimits) -> Plan:
    """Reads `config.plan`, or derives the default; raises `InvalidConfig` for a poor file."""
    return open_plan(config, limits).plan


def open_plan(config: EngineConfig, limits: PlanLimits) -> PlanFile:
    """`choose_plan`, and what the file knows of the shapes on a device."""
    if config.plan is None:
        return PlanFile(default_plan(limits))
    path = Path(config.plan).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        given = f"{path} ({error.strerror})"
        raise InvalidConfig("plan", "a readable file", given) from error
    except UnicodeDecodeError as error:
        raise InvalidConfig("plan", "a text file", f"{path} ({error.reason})") from error
    return read_plan_file(text, limits, str(path))


def read_plan(text: str, limits: PlanLimits, name: str) -> Plan:
    """The plan of `read_plan_file`."""
    return read_plan_file(text, limits, name).plan


def read_plan_file(text: str, limits: PlanLimits, name: str) -> PlanFile:
    """A plan file's text, checked for these budgets; raises `InvalidConfig` naming the fault."""
    try:
        content = plan_file_from_yaml(text)
        content.plan.validate(limits)
    except InvalidPlan as error:
        raise InvalidConfig("plan", "a plan for these limits", f"{name} ({error})") from error
    for shape in content.plan.shapes:
        if shape.variant not in VARIANTS:
            limit = f"of variants this engine has ({', '.join(VARIANTS)})"
            raise InvalidConfig("plan", limit, f"{name} ({shape})")
    return content
