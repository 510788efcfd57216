"""`tpu-engine serve`: the gRPC server in the foreground.

Owns what the operator sees. The server itself is wired in `server.main`.
"""

from __future__ import annotations

import typer

from server.cli.startup import StartupDisplay, with_cache
from server.options import ServerOptions
from tpu_engine.config import EngineConfig

OPTIONS = (EngineConfig, ServerOptions)


def serve(config: EngineConfig, options: ServerOptions) -> None:
    """Serve a model over gRPC until SIGTERM; a second signal stops at once."""
    import asyncio

    from server.main import serve as serve_until_signal

    with StartupDisplay() as display:
        config = with_cache(config, display)

        def announce(line: str) -> None:
            if line.startswith(("ready", "stopped")):
                display.close()
            display.say(line)

        code = asyncio.run(serve_until_signal(config, options, announce, display.take))
    raise typer.Exit(code)
