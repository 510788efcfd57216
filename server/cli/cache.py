"""`tpu-engine cache`: lists, checks, explains, prunes and ships a folder of compiled programs.

Owns the commands and what they print. What a folder holds is `buckets`' part.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from server.cli import cache_explain
from server.cli.flags import with_flags
from server.cli.startup import default_cache
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig

if TYPE_CHECKING:
    from buckets.cache_store import CacheStore

DAY_S = 86400.0
# A writer that hasn't touched its file for so long is dead.
LEFTOVER_S = 3600.0
SET_ASIDE_S = 7 * DAY_S

app = typer.Typer(no_args_is_help=True, help="Look after the folder of compiled programs.")


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """Which folder.

    Attributes:
        cache: folder of compiled programs, or an address like gs://bucket/folder; this user's own
            if not given.
        signing_key: file with the secret that signs stored programs.
    """

    cache: str | None = None
    signing_key: str | None = None


@dataclass(frozen=True, slots=True)
class ShowFlags:
    """What to print.

    Attributes:
        json: print JSON.
    """

    json: bool = False


@dataclass(frozen=True, slots=True)
class RemovalFlags:
    """What may go.

    Attributes:
        max_bytes: remove the longest unused programs until the rest takes no more.
        max_age_days: remove programs unused for so many days.
        keep_plan: plan file whose shapes' programs stay in any case.
        dry_run: remove nothing, only say what would go.
    """

    max_bytes: int | None = None
    max_age_days: float | None = None
    keep_plan: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_age_days"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidConfig(name, "at least 0", value)
        if self.keep_plan is not None and self.max_bytes is None and self.max_age_days is None:
            limit = "given together with max_bytes or max_age_days"
            raise InvalidConfig("keep_plan", limit, self.keep_plan)


@dataclass(frozen=True, slots=True)
class ArchiveFlags:
    """Which archive.

    Attributes:
        file: the tar file.
    """

    file: str


def ls(flags: StoreFlags, show: ShowFlags) -> None:
    """List what is stored; changes nothing."""
    store = open_cache(flags)
    entries = store.entries()
    rows = [
        {
            "digest": digest,
            **info.key.to_json(),
            "num_bytes": info.num_bytes,
            "sha256": info.sha256,
            "is_signed": info.is_signed,
            "last_use_s": store.last_use_s(digest),
            "facts": info.facts,
        }
        for digest, info in entries.items()
    ]
    rows.sort(key=_in_order)
    if show.json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_table(rows)
    total = sum(info.num_bytes for info in entries.values())
    unread = len(store.digests()) - len(entries)
    more = f"; {unread} can't be read (tpu-engine cache verify names them)" if unread else ""
    typer.echo(f"{len(entries)} programs, {_mib(total)} MiB in {store.directory}{more}")


def verify(flags: StoreFlags, show: ShowFlags) -> None:
    """Read every file, name the bad ones and mend the index; exits with 1 if any is bad."""
    store = open_cache(flags)
    checked = dict(store.check())
    records = store.records()
    bad = {digest: reason for digest, reason in checked.items() if reason}
    bad_records = [
        f"{kind}/{name}" for kind, name in records if store.get_record(kind, name) is None
    ]
    was_behind, trouble = store.refresh()
    if show.json:
        report = {"checked": len(checked), "bad": bad, "records": len(records)}
        typer.echo(json.dumps(report | {"bad_records": bad_records}, indent=1))
    else:
        for digest, reason in bad.items():
            typer.echo(f"bad: {digest}: {reason}")
        for name in bad_records:
            typer.echo(f"bad: record {name}: damaged, or not signed with this key")
        if was_behind:
            typer.echo(trouble or "the manifest was behind: made anew")
        whole = len(checked) - len(bad)
        typer.echo(f"{whole} of {len(checked)} programs are whole, {len(records)} records")
    if bad or bad_records:
        raise typer.Exit(1)


def gc(flags: StoreFlags, removal: RemovalFlags) -> None:
    """Remove programs nobody used, down to a size, and what killed writers left behind."""
    from buckets.cache_upkeep import Usage, choose_removals

    store = open_cache(flags)
    now_s = time.time()
    entries = store.entries()
    usage = {
        digest: Usage(info.key.shape, info.num_bytes, store.last_use_s(digest))
        for digest, info in entries.items()
    }
    age_days = removal.max_age_days
    going = choose_removals(
        usage,
        kept_shapes=_plan_shapes(removal.keep_plan),
        unused_since_s=None if age_days is None else now_s - age_days * DAY_S,
        max_bytes=removal.max_bytes,
    )
    freed = sum(usage[digest].num_bytes for digest in going)
    left = sum(one.num_bytes for one in usage.values()) - freed
    for digest in sorted(going):
        typer.echo(f"{digest[:12]} {usage[digest].shape}")
    verb = "would be removed" if removal.dry_run else "removed"
    if not removal.dry_run:
        _remove(store, going, now_s)
    typer.echo(f"{len(going)} programs ({_mib(freed)} MiB) {verb}, {_mib(left)} MiB left")
    if removal.max_bytes is not None and left > removal.max_bytes:
        raise InvalidConfig(
            "max_bytes", f"at least {left}, what keep_plan keeps", removal.max_bytes
        )


def pack(archive: ArchiveFlags, flags: StoreFlags) -> None:
    """Put all programs into one tar file, each checked; exits with 1 if one is bad."""
    from buckets import cache_archive

    store = open_cache(flags)
    with _written_whole(Path(archive.file).expanduser()) as file:
        count, bad = cache_archive.pack(store, file)
    for digest, reason in bad:
        typer.echo(f"left out: {digest}: {reason}", err=True)
    typer.echo(f"{count} programs packed into {archive.file}")
    if bad:
        raise typer.Exit(1)


def unpack(archive: ArchiveFlags, flags: StoreFlags) -> None:
    """Add the programs of a tar file, each checked; exits with 1 if one is refused."""
    from buckets import cache_archive

    store = open_cache(flags, make=True)
    try:
        result = cache_archive.unpack(Path(archive.file).expanduser(), store)
    except cache_archive.BadArchive as error:
        raise EngineError(str(error)) from error
    for name, reason in result.refused:
        typer.echo(f"refused: {name}: {reason}", err=True)
    typer.echo(
        f"{result.entries} programs and {result.records} records added, "
        f"{result.present} programs were there already"
    )
    if result.refused:
        raise typer.Exit(1)


def open_cache(flags: StoreFlags, *, make: bool = False) -> CacheStore:
    """The folder these flags name; `InvalidConfig` where it isn't there and mustn't be made."""
    from tpu_engine.compile_store import open_folder

    return open_folder(flags.cache or str(default_cache()), flags.signing_key, "cache", make=make)


def _remove(store: CacheStore, digests: set[str], now_s: float) -> None:
    """Entries, recipes that lead to none, and old files nobody wants any more."""
    trouble = [store.remove(digests)] if digests else []
    programs = {info.key.program for info in store.entries().values()}

    def is_idle(kind: str, name: str) -> bool:
        content = store.get_record(kind, name) if kind == "recipe" else None
        return content is not None and content.get("program") not in programs

    idle = [pair for pair in store.records() if is_idle(*pair)]
    trouble.append(store.remove_records(idle))
    count = store.remove_leftovers(now_s - LEFTOVER_S) + store.remove_set_aside(now_s - SET_ASIDE_S)
    if idle or count:
        typer.echo(f"{len(idle)} records and {count} leftover files removed")
    if reasons := "; ".join(filter(None, trouble)):
        raise EngineError(f"{store.directory}: {reasons}")


def _plan_shapes(path: str | None) -> frozenset[str]:
    from buckets.plan import InvalidPlan
    from buckets.plan_file import plan_from_yaml

    if path is None:
        return frozenset()
    try:
        plan = plan_from_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InvalidPlan) as error:
        raise InvalidConfig("keep_plan", "a readable plan file", f"{path} ({error})") from error
    return frozenset(map(str, plan.shapes))


@contextlib.contextmanager
def _written_whole(path: Path) -> Generator[Any]:
    """A file that appears under its name only once everything is in it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_order(row: dict[str, Any]) -> tuple[list[int], str]:
    """Small shapes first, as in a plan."""
    sizes = [int(word.partition("=")[2] or 0) for word in row["shape"].split() if "=" in word]
    return sizes, row["digest"]


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from server.cli.kernel_lab.terminal import wide_console

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("digest", "shape", "devices", "mesh", "versions"):
        table.add_column(name, overflow="fold")
    for name in ("MiB", "compile s", "signed", "unused"):
        table.add_column(name, justify="right")
    now_s = time.time()
    for row in rows:
        seconds = row["facts"].get("compile_s")
        built_on = f" ({row['built_on']})" if row["built_on"] else ""
        table.add_row(
            row["digest"][:12],
            row["shape"],
            row["devices"] + built_on,
            row["mesh"],
            row["versions"],
            _mib(row["num_bytes"]),
            f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
            "yes" if row["is_signed"] else "no",
            _age(now_s - row["last_use_s"]) if row["last_use_s"] else "",
        )
    wide_console().print(table)


def _age(seconds: float) -> str:
    return f"{seconds / DAY_S:.0f} d" if seconds >= DAY_S else f"{max(seconds, 0) / 3600:.0f} h"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.2f}"


app.command("ls")(with_flags(StoreFlags, ShowFlags)(ls))
app.command("verify")(with_flags(StoreFlags, ShowFlags)(verify))
app.command("explain")(
    with_flags(cache_explain.ExplainFlags, EngineConfig, argument="shape")(cache_explain.explain)
)
app.command("gc")(with_flags(StoreFlags, RemovalFlags)(gc))
app.command("pack")(with_flags(ArchiveFlags, StoreFlags, argument="file")(pack))
app.command("unpack")(with_flags(ArchiveFlags, StoreFlags, argument="file")(unpack))
