"""CPU time per thread of a process, from Linux' /proc.

Owns the reading and the grouping of threads by what they are for. Knows no engine: groups go by
the names that libraries give their threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# Prefixes of thread names (the kernel keeps 15 characters) that the libraries in use give.
_GROUPS = {
    "compute": ("tf_", "XLA", "xla", "pjrt", "Eigen", "eigen", "jax"),
    "transport": ("grpc", "event_engine", "timer_", "resolver", "iomgr"),
}


def thread_seconds(pid: int) -> dict[int, tuple[str, float]]:
    """Thread id to (name, CPU seconds so far), for every live thread of `pid`."""
    found: dict[int, tuple[str, float]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended while we looked
        found[int(task.name)] = name, nanoseconds / 1e9
    return found


def grouped(
    pid: int,
    before: Mapping[int, tuple[str, float]],
    after: Mapping[int, tuple[str, float]],
) -> dict[str, float]:
    """CPU seconds between two readings: "front" (main thread), "compute", "transport", "other".

    "other" is mainly the step loop's thread, with whatever part of a program it runs itself.
    """
    groups = ("front", "compute", "transport", "other")
    seconds: dict[str, float] = dict.fromkeys(groups, 0.0)
    for thread, (name, total) in after.items():
        spent = total - before.get(thread, (name, 0.0))[1]
        seconds[_group(pid, thread, name)] += spent
    return seconds


def _group(pid: int, thread: int, name: str) -> str:
    if thread == pid:
        return "front"
    for group, prefixes in _GROUPS.items():
        if name.startswith(prefixes):
            return group
    return "other"
