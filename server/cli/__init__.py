"""The `tpu-engine` command; one module per subcommand.

Owns the list of commands. Engine, JAX and gRPC are imported by a command when it runs, so that
`--help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli import (
    batch,
    bench,
    cache,
    chat,
    demo,
    doctor,
    generate,
    kernels,
    plan,
    serve,
    status,
    warmup,
)
from server.cli.flags import with_flags
from server.version import package_version

app = typer.Typer(
    name="tpu-engine",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpu-engine {package_version()}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Serve large language models over gRPC, on TPU or CPU."""


app.command("serve")(with_flags(*serve.OPTIONS)(serve.serve))
app.command("generate")(with_flags(*generate.OPTIONS)(generate.generate))
app.command("chat")(with_flags(*chat.OPTIONS, optional=chat.OPTIONAL)(chat.chat))
app.command("batch")(with_flags(*batch.OPTIONS)(batch.batch))
app.command("bench")(with_flags(*bench.OPTIONS)(bench.bench))
app.command("warmup")(with_flags(*warmup.OPTIONS, argument="model")(warmup.warmup))
app.command("doctor")(with_flags(*doctor.OPTIONS)(doctor.doctor))
app.command("demo")(with_flags(*demo.OPTIONS)(demo.demo))
app.command("status")(status.status)
app.add_typer(cache.app, name="cache")
app.add_typer(kernels.app, name="kernels")
app.add_typer(plan.app, name="plan")


def main() -> None:
    """Entry point of the console script."""
    app()
