"""`tpu-engine cache explain`: why a server would find its programs in a cache, or wouldn't.

Owns the command. It asks for exactly what `serve` with the same options asks for on this machine,
or would on named devices; how keys are compared is `buckets`' part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from server.cli.startup import default_cache
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from buckets.cache_store import CacheStore
    from buckets.shape import StepShape
    from tpu_engine.target import StepTarget


@dataclass(frozen=True, slots=True)
class ExplainFlags:
    """What to explain.

    Attributes:
        shape: words of a shape as in `cache ls`, tokens=16 seqs=1; all shapes of the plan that
            have them, or every one if none is given.
        cache: folder of compiled programs; the same as compile_cache.
        topology: devices that would serve, such as v6e:2x4, none of which need be here; this
            machine's own if not given.
        mesh: axes and sizes, as tensor=8, as at warmup.
        json: print JSON.
    """

    shape: tuple[str, ...] = ()
    cache: str | None = None
    topology: str | None = None
    mesh: str | None = None
    json: bool = False


def explain(flags: ExplainFlags, config: EngineConfig) -> None:
    """Say what differs between stored programs and what serve would ask for.

    Exits with 1 unless everything is stored and whole.
    """
    target, store = _open(flags, config)
    shapes = _matching(target.plan.shapes, flags.shape)
    rows = list(_rows(target, store, shapes))
    if flags.json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        _print(rows)
    raise typer.Exit(0 if all(row["is_stored"] and not row["trouble"] for row in rows) else 1)


def _open(flags: ExplainFlags, config: EngineConfig) -> tuple[StepTarget, CacheStore]:
    from server.cli.tpu_compiler import warm_up_variables
    from tpu_engine.compile_store import open_folder
    from tpu_engine.prepare import prepare
    from tpu_engine.topology import target_devices
    from tpu_engine.warm_up import with_mesh
    from tpu_engine.weights.open_model import describe_model

    folder = flags.cache or config.compile_cache or str(default_cache())
    if config.compile_cache not in (None, folder):
        raise InvalidConfig("cache", f"{config.compile_cache}, as compile_cache", flags.cache)
    store = open_folder(folder, config.signing_key, "cache", make=False)
    model = describe_model(config.model)
    if model.note:
        typer.echo(f"warning: {model.note}", err=True)
    config = replace(config, compile_cache=folder)
    if flags.topology is not None:
        os.environ.update(warm_up_variables(os.environ))  # before JAX looks
    devices = target_devices(flags.topology)
    if flags.topology is not None or flags.mesh is not None:
        config = with_mesh(config, model.config, flags.mesh, len(devices))
    return prepare(config, model.config, model.num_token_ids, devices), store


def _matching(shapes: tuple[StepShape, ...], words: tuple[str, ...]) -> list[StepShape]:
    wanted = {word for given in words for word in given.split()}
    found = [shape for shape in shapes if wanted <= set(str(shape).split())]
    if not found:
        raise InvalidConfig("shape", f"one of the plan: {_list(shapes)}", " ".join(words))
    return found


def _list(shapes: tuple[StepShape, ...]) -> str:
    return ", ".join(f"({shape})" for shape in shapes)


def _rows(
    target: StepTarget, store: CacheStore, shapes: list[StepShape]
) -> Iterator[dict[str, Any]]:
    from buckets.cache_entry import BadEntry
    from buckets.cache_upkeep import explain as compare
    from buckets.executable import ExecutableSource

    stored = [info.key for info in store.entries().values()]
    source = ExecutableSource(target, store)
    for shape in shapes:
        found = compare(source.key(shape), stored)
        trouble = ""
        if found.is_stored:
            try:
                store.export_entry(found.digest)
            except (OSError, BadEntry) as error:
                trouble = str(error)
        row = {"shape": str(shape), "is_stored": found.is_stored, "trouble": trouble}
        yield row | asdict(found)


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        digest = row["digest"][:12]
        if row["is_stored"]:
            fault = f", but can't be used: {row['trouble']}" if row["trouble"] else ""
            typer.echo(f"({row['shape']}) stored as {digest}{fault}")
        elif row["nearest"] is None:
            typer.echo(f"({row['shape']}) not stored: no program of this shape is")
        else:
            typer.echo(f"({row['shape']}) not stored; the nearest, {row['nearest'][:12]}, differs:")
            for one in row["differences"]:
                typer.echo(f"    {one['component']}: {one['change']}")
