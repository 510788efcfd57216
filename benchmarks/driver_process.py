"""Runs one driver as a subprocess and reads its lines.

Owns the driver's life: from its start to its end or its time limit. Knows no engine; the lines are
described in `benchmarks.ours.events`.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Driver:
    """How to start one engine's driver: command line, and the folder it runs in."""

    name: str
    command: list[str]
    folder: Path


@dataclass(slots=True)
class DriverRun:
    """What one run of a driver said: seconds to readiness, facts, and values by name."""

    ready_s: float = 0.0
    facts: dict[str, object] = field(default_factory=dict[str, object])
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class DriverFailed(RuntimeError):
    """A driver ended badly; carries its last lines of log."""


def run_driver(
    driver: Driver, log: Path, on_value: Callable[[str, float], None], limit_s: float
) -> DriverRun:
    """Runs `driver` to its end, its standard error into `log`; raises `DriverFailed`."""
    run = DriverRun()
    begin = time.perf_counter()
    with (
        log.open("w") as errors,
        subprocess.Popen(
            driver.command, cwd=driver.folder, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _take(line, run, time.perf_counter() - begin, on_value)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if code != 0 or not run.values:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise DriverFailed(f"{driver.name} ended with exit code {code}:\n{tail}")
    return run


def _take(line: str, run: DriverRun, now_s: float, on_value: Callable[[str, float], None]) -> None:
    if not line.startswith("{"):
        return  # something a library printed
    said = json.loads(line)
    if said.pop("event") == "ready":
        # A driver that starts another process knows its time better than we do.
        run.ready_s = said.pop("ready_s", now_s)
        run.facts = said
    else:
        run.values[said["name"]].append(said["value"])
        on_value(said["name"], said["value"])
