"""The scheduler's public names: everything that chooses which work runs next."""

from tpu_engine.scheduler.choice import ExecutedTokensCost, StepCost
from tpu_engine.scheduler.limits import SchedulerLimits
from tpu_engine.scheduler.memory import Watermark, WatermarkLevels
from tpu_engine.scheduler.scheduler import Scheduler, SchedulerSnapshot

__all__ = [
    "ExecutedTokensCost",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerSnapshot",
    "StepCost",
    "Watermark",
    "WatermarkLevels",
]
