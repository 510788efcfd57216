"""`tpu-engine status`: what a running server is doing, as tables or as JSON.

Owns that display. What the figures mean is the protocol's to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from server.cli.flags import run_reporting_errors

if TYPE_CHECKING:
    from server.proto.tpu_engine.v1 import engine_pb2 as pb

# As text. A pipe or a narrow terminal gets whole lines, too.
MIN_WIDTH = 110


def status(
    address: Annotated[str, typer.Argument(help="Address of the server (host:port).")],
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as JSON, for programs.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Show what a running server does: its state, its shapes, its misses."""
    run_reporting_errors(lambda: _show(address, as_json=json), debug=debug)


def _show(address: str, *, as_json: bool) -> None:
    reply = asyncio.run(_ask(address))
    if as_json:
        from google.protobuf.json_format import MessageToJson

        text = MessageToJson(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        typer.echo(text)
        return
    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    for line in lines(reply):
        console.print(line, markup=False, soft_wrap=True)
    if reply.shapes:
        console.print(shape_table(reply))


async def _ask(address: str) -> pb.GetServerStatusResponse:
    from server.client import EngineClient

    async with EngineClient(address) as client:
        return await client.status()


def lines(reply: pb.GetServerStatusResponse) -> list[str]:
    """Everything but the shapes, one fact a line."""
    from server.proto.tpu_engine.v1 import engine_pb2 as pb

    state = pb.ServerState.Name(reply.state).removeprefix("SERVER_STATE_").lower()
    found = [f"{state} for {reply.uptime_s:.0f} s, version {reply.version}"]
    if reply.HasField("progress"):
        found.append(f"start: {_progress(reply.progress)}")
    if not reply.shapes:
        return found
    share = reply.useful_tokens / reply.executed_tokens if reply.executed_tokens else 1.0
    found += [
        f"requests: {reply.running} running, {reply.waiting} waiting, "
        f"{reply.open_streams} streams, {reply.preemptions} preemptions",
        f"pages: {reply.free_pages} of {reply.total_pages} free ({reply.watermark})",
        f"steps: {reply.steps}, {share:.1%} of {reply.executed_tokens} executed tokens useful",
        f"programs: {reply.compile_count} compiled in {reply.compile_s:.1f} s, "
        f"{reply.load_count} loaded in {reply.load_s:.1f} s",
    ]
    if reply.plan_change.phase not in ("", "none"):
        found.append(f"change of plan: {change_line(reply.plan_change)}")
    found.append(f"compile misses: {reply.miss_count}, {reply.miss_s:.1f} s")
    found += [f"  {_miss(miss)}" for miss in reply.misses]
    return found


def change_line(change: pb.PlanChange) -> str:
    """The course or the end of a change of plan."""
    text = f"{change.kind}, {change.phase}, {change.done}/{change.total} shapes warmed"
    if change.error:
        return f"{text}: {change.error}"
    return text + _rest(change)


def shape_table(reply: pb.GetServerStatusResponse) -> Table:
    """One row per shape, the busiest first."""
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "seqs", "variant", "in plan", "program", "steps", "useful"):
        table.add_column(name, justify="left" if name in ("variant", "program") else "right")
    for name in ("of steps' time", "ms a step", "note"):
        table.add_column(name, justify="left" if name == "note" else "right")
    total_s = sum(shape.step_s for shape in reply.shapes) or 1.0
    for status in sorted(reply.shapes, key=lambda shape: -shape.step_s):
        shape = status.shape
        useful = f"{status.useful_tokens / status.executed_tokens:.1%}" if status.steps else "-"
        each_ms = f"{1000 * status.step_s / status.steps:.1f}" if status.steps else "-"
        had = f"{status.source} {status.source_s:.1f} s" if status.source else "none"
        in_plan = "yes" if status.in_plan else "no"
        table.add_row(
            *(str(shape.num_tokens), str(shape.num_seqs), shape.variant, in_plan, had),
            *(str(status.steps), useful, f"{status.step_s / total_s:.1%}", each_ms, status.note),
        )
    return table


def _progress(progress: pb.Progress) -> str:
    return f"{progress.phase} {progress.done}/{progress.total}{_rest(progress)}"


def _rest(state: Any) -> str:
    """What a `Progress` or a `PlanChange` says of the rest."""
    text = f", now {state.current}" if state.current else ""
    if state.HasField("seconds_left") and state.done < state.total:
        text += f", about {state.seconds_left:.0f} s left"
    return text


def _miss(miss: pb.CompileMiss) -> str:
    shape, ids = miss.shape, ", ".join(map(str, miss.request_ids))
    name = f"tokens={shape.num_tokens} seqs={shape.num_seqs} {shape.variant}"
    return f"{name}: {miss.why}; requests {ids}: {miss.outcome} in {miss.seconds:.1f} s"
