"""`tpu-engine plan swap`: gives a running server another plan.

Owns that command. The change itself happens in the server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from server.cli.flags import run_reporting_errors
from server.cli.status import change_line
from tpu_engine.errors import EngineError

POLL_S = 0.5


class SwapFailed(EngineError):
    """The server serves on with the plan it had; says why."""


def swap(
    address: Annotated[str, typer.Argument(help="Address of the server (host:port).")],
    file: Annotated[Path, typer.Argument(help="Plan file.", exists=True, dir_okay=False)],
    wait: Annotated[
        bool, typer.Option(help="Wait until the new plan is served with, or has failed.")
    ] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Change the plan of a running server (started with --allow-plan-swap)."""
    text = file.read_text(encoding="utf-8", errors="replace")
    run_reporting_errors(lambda: asyncio.run(_swap(address, text, wait=wait)), debug=debug)


async def _swap(address: str, plan_yaml: str, *, wait: bool) -> None:
    from server.client import EngineClient

    async with EngineClient(address) as client:
        count = await client.swap_plan(plan_yaml)
        typer.echo(f"accepted: {count} shapes to warm")
        said = ""
        while wait:
            change = (await client.status()).plan_change
            line = change_line(change)
            if line != said:
                typer.echo(line)
                said = line
            if change.phase == "failed":
                raise SwapFailed("the plan was not changed; the server serves on with its own")
            if change.phase == "done":
                return
            await asyncio.sleep(POLL_S)
