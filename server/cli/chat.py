"""`tpu-engine chat`: a conversation in the terminal, with an engine here or a server.

Owns the conversation and its display. Ctrl-C ends an answer, Ctrl-D the conversation.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import typer

from server.cli.sampling import SamplingFlags
from server.cli.startup import open_engine
from tpu_engine.config import EngineConfig
from tpu_engine.errors import EngineError, InvalidConfig


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Whom to talk to.

    Attributes:
        server: address of a running server (host:port); without it the engine runs here.
        system: a system message that opens the conversation.
    """

    server: str | None = None
    system: str | None = None


Turns = list[tuple[str, str]]
Talker = Callable[[Turns], Generator[str]]
OPTIONS = (ChatFlags, EngineConfig, SamplingFlags)
OPTIONAL = (EngineConfig,)


def chat(flags: ChatFlags, config: EngineConfig | None, sampling: SamplingFlags) -> None:
    """Talk to a model in the terminal: Ctrl-C ends an answer, Ctrl-D the conversation."""
    if (flags.server is None) == (config is None):
        limit = "given, or else --model and other options of an engine; one of both"
        raise InvalidConfig("server", limit, flags.server)
    if config is None:
        talker = server_talker(str(flags.server), sampling)
    else:
        talker = offline_talker(config, sampling)
    turns: Turns = [] if flags.system is None else [("system", flags.system)]
    converse(turns, talker)


def converse(turns: Turns, talker: Talker) -> None:
    """Reads lines and prints answers until the input ends."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not line.strip():
            continue
        turns.append(("user", line))
        answer: list[str] = []
        try:
            with closing(talker(turns)) as pieces:
                for piece in pieces:
                    answer.append(piece)
                    typer.echo(piece, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        typer.echo()
        turns.append(("assistant", "".join(answer)))


def offline_talker(config: EngineConfig, sampling: SamplingFlags) -> Talker:
    """Answers from an engine in this process."""
    from tpu_engine.front import ChatMessage, ChatPrompt

    _, engine = open_engine(config)

    def answer(turns: Turns) -> Generator[str]:
        prompt = ChatPrompt(tuple(ChatMessage(role, content) for role, content in turns))
        asks = [(0, sampling.ask(prompt))]
        with interrupts_held() as interrupted, closing(engine.run(asks)) as pieces:
            for _, piece in pieces:
                if isinstance(piece, EngineError):
                    raise piece
                yield piece.text
                if interrupted.is_set():
                    raise KeyboardInterrupt

    return answer


@contextmanager
def interrupts_held() -> Generator[threading.Event]:
    """Ctrl-C sets the event and raises nothing: an engine must not stop in the middle of a step."""
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def server_talker(address: str, sampling: SamplingFlags) -> Talker:
    """Answers from a server."""
    import grpc

    from server.proto.tpu_engine.v1 import engine_pb2 as pb
    from server.proto.tpu_engine.v1.engine_pb2_grpc import EngineStub

    stub = cast("Any", EngineStub(grpc.insecure_channel(address)))

    def answer(turns: Turns) -> Generator[str]:
        request = sampling.message()
        messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
        request.chat.CopyFrom(pb.Chat(messages=messages))
        call = stub.Generate(request)
        try:
            for response in call:
                yield response.delta.text
        finally:
            call.cancel()

    return answer
