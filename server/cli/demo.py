"""`tpu-engine demo`: a real server, three prompts at once over gRPC, a clean stop.

Owns the tour a new user sees. Everything in it is what any client and any operator would do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from server.cli.startup import StartupDisplay, default_cache
from tpu_engine.errors import EngineError

if TYPE_CHECKING:
    from server.client import EngineClient

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
FRAME_WIDTH = 4
PROMPTS = (
    "What is gravity?",
    "Write two sentences about the sea.",
    "Name three uses of copper.",
)


@dataclass(frozen=True, slots=True)
class DemoFlags:
    """What to show.

    Attributes:
        model: the model to serve.
        max_tokens: most tokens of each answer.
        compile_cache: folder that keeps compiled programs, so that a second run starts at once.
    """

    model: str = "smollm2-135m-instruct"
    max_tokens: int = 128
    compile_cache: str | None = None


@dataclass(slots=True)
class Answer:
    """One streamed answer and what its client saw (seconds)."""

    prompt: str
    text: str = ""
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    reason: str = ""


OPTIONS = (DemoFlags,)


def demo(flags: DemoFlags) -> None:
    """Serve a small model, ask it three things at once over gRPC, stop it cleanly."""
    raise typer.Exit(asyncio.run(_demo(flags)))


async def _demo(flags: DemoFlags) -> int:
    from grpc.aio import AioRpcError

    from server.client import EngineClient

    console = Console(highlight=False)
    cache = Path(flags.compile_cache) if flags.compile_cache else default_cache()
    console.print(f"Starting a server with {flags.model}")
    console.print(f"Compiled programs are kept in {cache}", soft_wrap=True)
    command = ["serve", "--model", flags.model, "--port", "0", "--compile-cache", str(cache)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "server.cli", *command, stderr=asyncio.subprocess.PIPE
    )
    log = ServerLog(child)
    try:
        address = await log.address()
        async with EngineClient(address) as client:
            try:
                await _show_startup(client)
            except AioRpcError:  # it answered before, so it is gone
                raise await log.why_ended() from None
            answers = await _ask_all(client, console, flags.max_tokens)
            console.print(_timings(answers))
            await _show_shapes(client, console)
        return await _stop(child, console)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


class ServerLog:
    """Reads the server's standard error and keeps its last lines."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._lines: deque[str] = deque(maxlen=20)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    async def address(self) -> str:
        """Where the server listens; raises `EngineError` with its last line if it ended."""
        return await self._address

    async def why_ended(self) -> EngineError:
        """The server's last line, once it has ended."""
        await asyncio.wait_for(asyncio.shield(self._reading), STOP_TIMEOUT_S)
        return self._ended()

    async def _read(self) -> None:
        assert self._child.stderr is not None
        async for raw in self._child.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if line.startswith("listening on ") and not self._address.done():
                self._address.set_result(line.removeprefix("listening on "))
        if not self._address.done():
            self._address.set_exception(self._ended())

    def _ended(self) -> EngineError:
        return EngineError(f"the server ended: {self._lines[-1] if self._lines else 'no output'}")


async def _show_startup(client: EngineClient) -> None:
    from server.proto.tpu_engine.v1 import engine_pb2 as pb

    started_s = time.monotonic()
    with StartupDisplay() as display:
        shown = None
        while (status := await client.status()).state == pb.SERVER_STATE_STARTING:
            progress = status.progress
            if progress.total and progress != shown:
                left_s = progress.seconds_left if progress.HasField("seconds_left") else None
                display.report(
                    progress.phase, progress.done, progress.total, progress.detail, left_s
                )
                shown = progress
            await asyncio.sleep(POLL_S)
        if status.state == pb.SERVER_STATE_READY:
            display.complete()
        display.close()
        display.say(f"ready after {time.monotonic() - started_s:.1f} s")


async def _ask_all(client: EngineClient, console: Console, max_tokens: int) -> list[Answer]:
    answers = [Answer(prompt) for prompt in PROMPTS]
    # While answers grow, their last lines: a live view can't be taller than the terminal.
    num_lines = max(1, (console.height - 1) // len(answers) - 2)
    with Live(console=console, transient=True, refresh_per_second=12) as live:

        def show() -> None:
            if console.is_terminal:
                live.update(_panels(answers, console, num_lines))

        await asyncio.gather(*(_ask(client, answer, max_tokens, show) for answer in answers))
    console.print(_panels(answers, console, None))
    return answers


async def _ask(
    client: EngineClient, answer: Answer, max_tokens: int, show: Callable[[], None]
) -> None:
    from server.proto.tpu_engine.v1 import engine_pb2 as pb

    messages = [pb.ChatMessage(role="user", content=answer.prompt)]
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=messages), max_tokens=max_tokens, temperature=0.0
    )
    sent_s = last_s = time.perf_counter()
    async for response in client.generate(request):
        now = time.perf_counter()
        if response.HasField("delta"):
            if answer.ttft_s is None:
                answer.ttft_s = now - sent_s
            else:
                answer.gaps_s.append(now - last_s)
            last_s = now
            answer.text += response.delta.text
            answer.num_tokens += len(response.delta.token_ids)
            show()
        elif response.HasField("finished"):
            name = pb.FinishReason.Name(response.finished.reason)
            answer.reason = name.removeprefix("FINISH_REASON_").lower()


def _panels(answers: Sequence[Answer], console: Console, num_lines: int | None) -> Group:
    """Every answer in a frame, cut to its last `num_lines` lines (None: whole)."""
    panels: list[Panel] = []
    for answer in answers:
        lines = Text(answer.text).wrap(console, console.width - FRAME_WIDTH)
        shown = lines if num_lines is None else lines[-num_lines:]
        panels.append(Panel(Text("\n").join(shown), title=answer.prompt))
    return Group(*panels)


def _timings(answers: Sequence[Answer]) -> Table:
    table = Table(title="What the three clients saw")
    for name in ("prompt", "tokens", "TTFT (ms)", "mean ITL (ms)", "finish reason"):
        table.add_column(name, justify="left" if name in ("prompt", "finish reason") else "right")
    for answer in answers:
        mean_s = sum(answer.gaps_s) / len(answer.gaps_s) if answer.gaps_s else 0.0
        cells = (f"{(answer.ttft_s or 0.0) * 1000:.0f}", f"{mean_s * 1000:.1f}", answer.reason)
        table.add_row(answer.prompt, str(answer.num_tokens), *cells)
    return table


async def _show_shapes(client: EngineClient, console: Console) -> None:
    info, status = await client.model_info(), await client.status()
    shapes = ", ".join(f"{shape.num_tokens}x{shape.num_seqs}" for shape in info.shapes)
    console.print(f"Compiled shapes (tokens x sequences): {shapes}")
    cached = len(info.shapes) - status.compile_count
    console.print(
        f"{status.compile_count} compiled, {cached} from the cache, none while serving; "
        f"{status.steps} steps, {status.useful_tokens} useful of "
        f"{status.executed_tokens} executed tokens."
    )


async def _stop(child: asyncio.subprocess.Process, console: Console) -> int:
    child.send_signal(signal.SIGTERM)
    code = await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
    console.print(f"Server stopped by SIGTERM, exit code {code}.")
    _show_next(console)
    return code


def _show_next(console: Console) -> None:
    # Ours is not in the path until the environment is activated, as `make demo` leaves it.
    here = Path(sys.executable).parent
    if here not in (Path(folder) for folder in os.get_exec_path()):
        shown = os.path.relpath(here) if here.is_relative_to(Path.cwd()) else here
        console.print(f"\nNext, after `source {shown}/activate`:", soft_wrap=True)
    else:
        console.print("\nNext:")
    console.print(
        "  tpu-engine chat --model smollm2-135m-instruct    talk to it in the terminal\n"
        "  tpu-engine serve --model smollm2-135m-instruct   keep a server running\n"
        "  tpu-engine bench                                 put a load on that server\n"
        "  tpu-engine --help                                everything else"
    )
