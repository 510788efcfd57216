"""Starts compiler processes and reads what they leave behind.

Owns the environment and the flags of such a process: it sees no accelerator, targets the chip it
is told, and dumps final schedules into a folder of its own. One process per compile, because the
compiler reads its flags once and ends the process when it fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.analysis.dump import PASS_REGEX, kernel_files
from kernels.analysis.prediction import WorkFacts
from kernels.analysis.schedule import KernelSchedule, read_schedule
from server.cli.kernel_lab.cases import KernelCase
from server.cli.tpu_compiler import VARIABLES
from tpu_engine.errors import EngineError

MAX_JOBS = 2
TIMEOUT_S = 900.0
MOST_WORDS = 600  # of an error: the compiler repeats whole instructions
_LIMIT = re.compile(r"[^.]*(?:\.\d[^.]*)*\bexceeded\b[^.]*(?:\.\d[^.]*)*\.")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b|F\d{4} ).*", re.MULTILINE)


class CompileFailed(EngineError):
    """A kernel the compiler refused: says which, and the compiler's last words."""


@dataclass(frozen=True, slots=True)
class Job:
    """One compile: a case, a chip, and blocks (None: what the kernel would choose)."""

    case: KernelCase
    chip: str
    blocks: Mapping[str, int] | None = None

    @property
    def label(self) -> str:
        return f"{self.chip} {self.case.label}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compile gave: its schedule and what the process said of it."""

    job: Job
    schedule: KernelSchedule
    facts: WorkFacts
    said: dict[str, Any]


def require_compiler() -> None:
    """Raises `EngineError` where there is no TPU compiler."""
    if importlib.util.find_spec("libtpu") is None:
        raise EngineError(
            "the TPU compiler (libtpu) is not installed: pip install 'tpu-engine[tpu]'; "
            "no TPU is needed"
        )


def compiler_environment(dump: Path) -> dict[str, str]:
    """The environment of a process that compiles for TPUs without one, dumping to `dump`."""
    flags = (
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        f"--xla_jf_dump_llo_pass_label_regex={PASS_REGEX}",
    )
    environment = dict(os.environ)
    environment |= {
        **VARIABLES,
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached kernel leaves no dump
        "LIBTPU_INIT_ARGS": " ".join((environment.get("LIBTPU_INIT_ARGS", ""), *flags)).strip(),
    }
    return environment


def compile_all(
    jobs: Sequence[Job],
    *,
    num_parallel: int = 1,
    keep: Path | None = None,
    on_start: Callable[[Job], None] = lambda _: None,
) -> Iterator[Compiled | CompileFailed]:
    """Compiles `jobs`, in the order they get done; a kernel that fails is an item, not an end."""

    def one(job: Job) -> Compiled | CompileFailed:
        on_start(job)
        try:
            return compile_one(job, keep)
        except CompileFailed as failure:
            return failure

    with ThreadPoolExecutor(min(num_parallel, MAX_JOBS)) as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def compile_one(job: Job, keep: Path | None = None) -> Compiled:
    """Compiles one job in a process of its own; its dump stays where `keep` says, if given."""
    with tempfile.TemporaryDirectory(prefix="tpu-engine-kernels-") as scratch:
        folder = Path(scratch)
        if keep is not None:
            folder = keep / job.label.replace(" ", "_").replace("/", "-")
            folder.mkdir(parents=True, exist_ok=True)
        said = _run(job, folder)
        found = [files for files in kernel_files(folder) if job.case.kernel in files.name]
        if not found:
            raise CompileFailed(f"{job.label}: the compiler left no schedule of {job.case.kernel}")
        return Compiled(
            job, read_schedule(found[-1], chip=job.chip), WorkFacts(**said["facts"]), said
        )


def _run(job: Job, folder: Path) -> dict[str, Any]:
    order = json.dumps({"case": asdict(job.case), "chip": job.chip, "blocks": job.blocks})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "server.cli.kernel_lab.compiling", order],
            env=compiler_environment(folder),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CompileFailed(f"{job.label}: not compiled after {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise CompileFailed(f"{job.label}: {_last_words(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def _last_words(text: str) -> str:
    """The error at the end of a traceback or crash, on one line of bearable length."""
    starts = [match.start() for match in _ERROR.finditer(text)]
    words = " ".join(text[starts[-1] if starts else -MOST_WORDS :].split()) or "no output"
    if len(words) <= MOST_WORDS:
        return words
    limit = _LIMIT.search(words, MOST_WORDS // 2)
    return f"{words[: MOST_WORDS // 2]} ..." + (f" {limit[0].strip()}" if limit else "")
