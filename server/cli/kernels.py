"""`tpu-engine kernels`: report, read and tune TPU kernels on a machine without a TPU.

Owns the commands and their flags. The work is in `server.cli.kernel_lab`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.bench import writable
from server.cli.flags import run_reporting_errors, with_flags
from tpu_engine.errors import EngineError, InvalidConfig

if TYPE_CHECKING:
    from kernels.analysis.schedule import KernelSchedule
    from server.cli.kernel_lab.cases import KernelCase
    from server.cli.kernel_lab.launch import Compiled, Job
    from server.cli.kernel_lab.rows import Row

# The last committed report, where the command runs in a checkout.
COMMITTED = Path("benchmarks/results/kernels_report.json")
NAMED_CHANGES = 30  # lines of a comparison; the JSON files have the rest

app = typer.Typer(
    no_args_is_help=True, help="Predict how fast TPU kernels are, from the compiler's schedule."
)


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """What to compile and where to put the figures.

    Attributes:
        chip: chip to compile for: v4, v5p, v5e, v6e or tpu7x; several times for several (default:
            all, v4 and v5p with fewer shapes).
        kernel: only this kernel, decode_attention or chunk_attention.
        match: only cases whose name contains this ("page 16", "int8").
        json: file for the rows; rewritten after every compile, so that nothing is lost.
        html: file for a page with roofline plots.
        baseline: report to compare with (default: the committed one, in a checkout).
        fail_on_regression: exit with 1 if a figure is worse than the baseline's by more than this
            many percent.
        jobs: compiler processes at a time, 1 or 2.
        keep_dumps: folder to keep the compiler's dumps in.
    """

    chip: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    match: str = ""
    json: str | None = None
    html: str | None = None
    baseline: str | None = None
    fail_on_regression: float | None = None
    jobs: int = 1
    keep_dumps: str | None = None


@dataclass(frozen=True, slots=True)
class TuneFlags:
    """Which kernels to try blocks for, and how many.

    Attributes:
        chip: chip to tune for, several times for several (default: all).
        kernel: only this kernel, decode_attention or chunk_attention.
        match: only cases whose name contains this.
        candidates: block choices to compile per shape, the most promising first.
        table: file of tuned blocks to update (default: the one this package reads).
        jobs: compiler processes at a time, 1 or 2.
    """

    chip: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    match: str = ""
    candidates: int = 6
    table: str | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.candidates < 2:
            raise InvalidConfig("candidates", "at least 2", self.candidates)


def report(flags: ReportFlags) -> None:
    """Compile the attention kernels for TPUs and predict their speed (no TPU needed)."""
    from server.cli.kernel_lab.cases import DEFAULT_CHIPS, default_cases
    from server.cli.kernel_lab.launch import Job, require_compiler
    from server.cli.kernel_lab.page import report_page
    from server.cli.kernel_lab.rows import row_of
    from server.cli.kernel_lab.terminal import report_tables, wide_console

    chips = flags.chip or DEFAULT_CHIPS
    _check_chips(chips)
    require_compiler()
    baseline = _baseline(flags.baseline)
    json_file, html_file = _target(flags.json), _target(flags.html)
    cases = _matching(flags.match, {chip: default_cases(chip, flags.kernel) for chip in chips})
    jobs = [Job(case, chip) for chip in chips for case in cases[chip]]

    def save(compiled: Sequence[Compiled]) -> None:
        if json_file:
            json_file.write_text(json.dumps([row_of(one) for one in compiled], indent=1) + "\n")

    compiled, failures = _compile(jobs, flags.jobs, flags.keep_dumps, save)
    rows = [row_of(one) for one in compiled]
    if html_file:
        html_file.write_text(report_page(rows))
    console = wide_console()
    for table in report_tables(rows):
        console.print(table)
    is_worse = _compare(rows, baseline, flags.fail_on_regression)
    for failure in failures:
        typer.echo(f"error: {failure}", err=True)
    if failures or is_worse:
        raise typer.Exit(1)


def tune(flags: TuneFlags) -> None:
    """Find block sizes by compiling candidates, and write the table of tuned blocks."""
    from server.cli.kernel_lab import tuning
    from server.cli.kernel_lab.cases import DEFAULT_CHIPS, default_cases
    from server.cli.kernel_lab.launch import require_compiler

    chips = flags.chip or DEFAULT_CHIPS
    _check_chips(chips)
    require_compiler()
    target = writable(Path(flags.table) if flags.table else tuning.table_path())
    cases = _matching(flags.match, {chip: default_cases(chip, flags.kernel) for chip in chips})
    jobs = [
        job for chip in chips for job in tuning.candidate_jobs(cases[chip], chip, flags.candidates)
    ]
    compiled, failures = _compile(jobs, flags.jobs)
    entries = tuning.best_blocks(compiled)
    text = tuning.updated_table(target.read_text() or "[]", compiled, entries)
    target.write_text(text)
    for entry in entries:
        typer.echo(f"{entry['chip']} {entry['kernel']}: {entry['blocks']}")
    typer.echo(
        f"{len(entries)} of the shapes tried have better blocks than the kernel's own choice"
    )
    for failure in failures:
        typer.echo(f"not compiled: {failure}", err=True)


def read(
    dump: Annotated[Path, typer.Argument(help="Folder the compiler wrote to.")],
    match: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is not a Pallas kernel.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="File for everything that was read.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Read a compiler's dump of any Pallas kernel: loops, cycles, slots, DMAs, memory."""

    def show() -> None:
        target = _target(json_file)
        schedules = _schedules(dump, match, everything)
        if target:
            target.write_text(json.dumps([asdict(one) for one in schedules], indent=1) + "\n")
        for schedule in schedules:
            wide_console().print(schedule_table(schedule))

    from server.cli.kernel_lab.terminal import schedule_table, wide_console

    run_reporting_errors(show, debug=debug)


def _schedules(dump: Path, match: str, everything: bool) -> list[KernelSchedule]:
    from kernels.analysis.dump import DumpError, kernel_files
    from kernels.analysis.schedule import CUSTOM_CALL, read_schedule

    try:
        found = [read_schedule(files) for files in kernel_files(dump) if match in files.name]
    except DumpError as error:
        raise EngineError(str(error)) from error
    found = [schedule for schedule in found if everything or schedule.kind == CUSTOM_CALL]
    if not found:
        limit = "a folder with final bundles of a Pallas kernel"
        raise InvalidConfig("DUMP", limit, str(dump))
    return found


def _matching(text: str, cases: Mapping[str, Sequence[KernelCase]]) -> dict[str, list[KernelCase]]:
    """Of every chip's cases those whose name contains `text`; an error if no chip has any."""
    found = {chip: [one for one in of_chip if text in one.label] for chip, of_chip in cases.items()}
    if not any(found.values()):
        raise InvalidConfig("match", "part of a case's name", text)
    return found


def _check_chips(chips: Sequence[str]) -> None:
    from kernels.chips import CHIPS

    for chip in chips:
        if chip not in CHIPS:
            raise InvalidConfig("chip", f"one of {', '.join(CHIPS)}", chip)


def _baseline(given: str | None) -> list[Row] | None:
    from server.cli.kernel_lab.compare import read_report

    if given is not None:
        return read_report(Path(given))
    return read_report(COMMITTED) if COMMITTED.is_file() else None


def _target(path: str | None) -> Path | None:
    return None if path is None else writable(Path(path))


def _compile(
    jobs: Sequence[Job],
    num_parallel: int,
    keep: str | None = None,
    on_done: Callable[[Sequence[Compiled]], None] = lambda _: None,
) -> tuple[list[Compiled], list[EngineError]]:
    """All that could be compiled, in the order of `jobs`, and why the rest could not."""
    from server.cli.kernel_lab.launch import MAX_JOBS, CompileFailed, compile_all

    if not 1 <= num_parallel <= MAX_JOBS:
        raise InvalidConfig("jobs", f"from 1 to {MAX_JOBS}", num_parallel)
    compiled: list[Compiled] = []
    failures: list[EngineError] = []
    started = 0

    def say(job: Job) -> None:
        nonlocal started
        started += 1
        typer.echo(f"compiling {started}/{len(jobs)} {job.label}", err=True)

    folder = None if keep is None else Path(keep)
    for result in compile_all(jobs, num_parallel=num_parallel, keep=folder, on_start=say):
        if isinstance(result, CompileFailed):
            failures.append(result)
        else:
            compiled.append(result)
            compiled.sort(key=lambda one: jobs.index(one.job))
            on_done(compiled)
    return compiled, failures


def _compare(rows: list[Row], baseline: list[Row] | None, limit: float | None) -> bool:
    """Names what differs from the baseline; whether anything is worse by more than `limit`."""
    from server.cli.kernel_lab.compare import changes

    if baseline is None:
        typer.echo("no report to compare with", err=True)
        return False
    found = sorted(changes(rows, baseline), key=lambda change: -change.worse_by)
    for change in found[:NAMED_CHANGES]:
        typer.echo(str(change))
    if len(found) > NAMED_CHANGES:
        typer.echo(f"... and {len(found) - NAMED_CHANGES} more")
    if not found:
        typer.echo("no figure differs from the report it was compared with")
    return limit is not None and any(change.worse_by > limit for change in found)


app.command("report")(with_flags(ReportFlags)(report))
app.command("read")(read)
app.command("tune")(with_flags(TuneFlags)(tune))
