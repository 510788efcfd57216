"""Start-up shown in the terminal: one bar per phase, or plain lines where there is no terminal.

Owns this display, and the opening of an offline engine behind it. Knows no command.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from tpu_engine.config import EngineConfig

if TYPE_CHECKING:
    from tpu_engine import build
    from tpu_engine.build import BuiltEngine
    from tpu_engine.front_offline import OfflineEngine

# Enough open requests to refill every slot at once, few enough to hold all their results.
OPEN_PER_SLOT = 4


class StartupDisplay:
    """Shows start-up progress on stderr; use it as a context manager."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartupDisplay:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the bars as they are and gives the terminal back."""
        if self._bars.live.is_started:
            self._bars.stop()

    def complete(self) -> None:
        """Fills every bar: start-up ended well, though its last step may not have been seen."""
        for task in self._bars.tasks:
            self._bars.update(task.id, completed=task.total)

    def say(self, line: str) -> None:
        """Prints a line above the bars."""
        self.console.print(line, markup=False, soft_wrap=True)

    def report(
        self, phase: str, done: int, total: int, detail: str, seconds_left: float | None = None
    ) -> None:
        """Takes note of one step of start-up; any thread may call it."""
        if seconds_left and done < total:
            detail += f" ({seconds_left:.0f} s left)"
        if not self.console.is_terminal:
            # Hundreds of tensors are no news for a log; each compiled shape is.
            if phase != "weights" or done == total:
                self.say(f"{phase} {done}/{total} {detail}")
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, detail=detail)
        self._bars.update(self._tasks[phase], completed=done, total=total, detail=detail)

    def take(self, progress: build.Progress) -> None:
        """`report` for the builder's own type."""
        detail = progress.detail
        if progress.current and self.console.is_terminal:
            detail = progress.current
        self.report(progress.phase, progress.done, progress.total, detail, progress.seconds_left)


def default_cache() -> Path:
    """Where this user's compiled programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tpu_engine"


def with_cache(config: EngineConfig, display: StartupDisplay) -> EngineConfig:
    """Puts the user's own folder where no compile cache was named, if it can be written."""
    if config.compile_cache is not None:
        return config
    folder = default_cache()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        display.say(f"{folder} can't be written: compiled programs are not kept")
        return config
    return replace(config, compile_cache=str(folder))


def open_engine(config: EngineConfig) -> tuple[BuiltEngine, OfflineEngine[int]]:
    """Builds an engine with its progress shown, and the offline front on it."""
    from tpu_engine.front_engine import build_real_engine, open_intake
    from tpu_engine.front_offline import OfflineEngine

    with StartupDisplay() as display:
        built = build_real_engine(with_cache(config, display), display.take)
    max_open = min(OPEN_PER_SLOT * built.config.max_num_seqs, built.config.max_waiting)
    engine: OfflineEngine[int] = OfflineEngine(built.loop, open_intake(built), max_open)
    return built, engine
