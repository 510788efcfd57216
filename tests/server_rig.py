"""A real server over loopback on a fake runner: what the server's tests share.

Owns the fake engine (real scheduler, loop and step thread; tokens from `FakeRunner`), its
byte-level tokenizer, and the start and stop of an in-process server.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from buckets.plan import Plan, PlanLimits, default_plan
from buckets.shape import StepShape
from buckets.warm_order import opening_shapes
from server.client import EngineClient
from server.main import Server
from server.options import ServerOptions
from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.fake_runner import VOCAB, FakeRunner
from tpu_engine.config import EngineConfig
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.kv_pages import PagePool
from tpu_engine.misses import MissLog
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.step_plan import InFlight, StepPlan, StepResult
from tpu_engine.text.chat_template import ChatTemplate
from tpu_engine.text.tokenizer import Tokenizer
from tpu_engine.weights.open_model import GenerationDefaults

EOS_ID = VOCAB - 1
CONFIG = EngineConfig(
    model="fake",
    page_size=16,
    num_pages=513,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_waiting=128,
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class FakeModelConfig:
    """The part of a model's configuration that the front reads."""

    vocab_size: int = VOCAB
    eos_ids: frozenset[int] = frozenset({EOS_ID})


@dataclass(frozen=True)
class FakeModel:
    """What `OpenedModel` offers to the front."""

    tokenizer: Tokenizer
    config: FakeModelConfig = FakeModelConfig()
    chat_template: ChatTemplate = field(default_factory=lambda: ChatTemplate(TEMPLATE, {}))
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


@dataclass(frozen=True)
class FakeBuilt:
    """What `BuiltEngine` offers to the composition root."""

    loop: EngineLoop
    model: FakeModel
    config: EngineConfig
    plan: Plan
    runner: FakeRunner
    executables: FakeExecutables
    misses: MissLog = field(default_factory=MissLog)


@dataclass(frozen=True)
class FakeRecord:
    """What `ExecutableRecord` offers to the status."""

    shape: StepShape
    source: str = "compiled"
    seconds: float = 2.0
    note: str = ""


class FakeExecutables:
    """Shapes are built one by one, each when `gate` lets it; those in `broken` can't be."""

    def __init__(self, warm: Iterable[StepShape]) -> None:
        self.warm_shapes = frozenset(warm)
        self.records: tuple[FakeRecord, ...] = tuple(map(FakeRecord, sorted(self.warm_shapes)))
        self.planned = self.warm_shapes
        self.broken: set[StepShape] = set()
        self.gate = threading.Semaphore(1000)

    def plan(self, shapes: Iterable[StepShape]) -> None:
        self.planned |= frozenset(shapes)

    def build(self, shapes: Iterable[StepShape]) -> Iterator[FakeRecord]:
        for shape in shapes:
            assert shape in self.planned
            assert self.gate.acquire(timeout=20)
            if shape in self.broken:
                raise RuntimeError(f"no room for ({shape})")
            self.warm_shapes |= {shape}
            self.records += (FakeRecord(shape),)
            yield self.records[-1]

    def release(self, shapes: Iterable[StepShape]) -> None:
        self.warm_shapes -= frozenset(shapes)


class WatchfulRunner(FakeRunner):
    """Refuses what has no executable, as the real one does, and what was released in flight."""

    executables: FakeExecutables | None = None

    def dispatch(self, plan: StepPlan) -> Any:
        warm = None if self.executables is None else self.executables.warm_shapes
        assert warm is None or plan.shape in warm, f"({plan.shape}) is not warm"
        return super().dispatch(plan)

    def collect(self, handle: InFlight) -> StepResult:
        warm = None if self.executables is None else self.executables.warm_shapes
        assert warm is None or handle.plan.shape in warm, f"({handle.plan.shape}) was released"
        return super().collect(cast(Any, handle))


class SlowRunner(WatchfulRunner):
    """A `WatchfulRunner` whose steps take `step_s` seconds."""

    step_s = 0.0

    def collect(self, handle: InFlight) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        return super().collect(cast(Any, handle))


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, then two-letter tokens that no text is encoded to, then one special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    pieces = [*alphabet, *pairs]
    pieces += [f"<x{i}>" for i in range(VOCAB - len(pieces))]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([pieces[EOS_ID]])
    return Tokenizer(backend, "fake")


def fake_engine(
    config: EngineConfig = CONFIG, step_s: float = 0.0, *, partial: bool = False
) -> FakeBuilt:
    """An engine whose tokens are `fake_runner.expected_tokens`."""
    assert config.max_model_len is not None
    assert config.num_pages is not None
    width = -(-config.max_model_len // config.page_size)
    limits = PlanLimits(config.max_num_seqs, config.max_num_batched_tokens, width)
    plan = default_plan(limits)
    runner = SlowRunner(config.num_pages, config.page_size, config.max_num_seqs)
    runner.step_s = step_s
    first = Plan.of(opening_shapes(plan)) if partial else plan
    executables = runner.executables = FakeExecutables(first.shapes)
    scheduler = Scheduler(
        first,
        SchedulerLimits(config.max_model_len, config.page_size, config.max_waiting),
        PagePool(config.num_pages),
    )
    loop = EngineLoop(scheduler, runner, config.overlap)
    return FakeBuilt(loop, FakeModel(byte_tokenizer()), config, plan, runner, executables)


@dataclass(frozen=True)
class Rig:
    """A running server, a client of it, and the fake engine inside."""

    server: Server
    client: EngineClient
    address: str
    built: FakeBuilt

    async def wait_for(self, check: Callable[[pb.GetServerStatusResponse], bool]) -> None:
        """Waits until the server's status satisfies `check`; fails after ten seconds."""
        end_s = time.monotonic() + 10
        while not check(status := await self.client.status()):
            assert time.monotonic() < end_s, f"the server never got there: {status}"
            await asyncio.sleep(0.005)

    async def wait_idle(self) -> None:
        """Waits until every request is gone and every page is back."""
        await self.wait_for(
            lambda s: (
                s.running == s.waiting == s.open_streams == 0 and s.free_pages == s.total_pages
            )
        )


@asynccontextmanager
async def running_server(
    config: EngineConfig = CONFIG, step_s: float = 0.0, **server_options: Any
) -> AsyncIterator[Rig]:
    """A ready server on a free port, stopped without grace at the end."""
    built = fake_engine(config, step_s, partial=server_options.get("serve_partial", False))
    async with serving(built, config, **server_options) as rig:
        yield rig


@asynccontextmanager
async def serving(
    built: FakeBuilt, config: EngineConfig, **server_options: Any
) -> AsyncIterator[Rig]:
    """`running_server` for an engine that is there already."""
    options = ServerOptions(port=0, **server_options)
    server = Server(config, options, build=cast(Any, lambda *_: built))
    address = f"127.0.0.1:{await server.start()}"
    await server.make_ready()
    async with EngineClient(address) as client:
        try:
            yield Rig(server, client, address, built)
        finally:
            await server.drain(0.0)
            await server.stop()


@dataclass
class Answer:
    """A finished stream."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    deltas: list[str]
    started: pb.Started
    finished: pb.Finished


async def collect(call: AsyncIterable[pb.GenerateResponse]) -> Answer:
    """Reads a stream to its end; checks the order of its events."""
    answer = Answer("", [], [], [], pb.Started(), pb.Finished())
    kinds: list[str] = []
    async for response in call:
        kind = response.WhichOneof("event")
        kinds.append(str(kind))
        if kind == "started":
            answer.started = response.started
        elif kind == "delta":
            answer.deltas.append(response.delta.text)
            answer.token_ids += response.delta.token_ids
            answer.logprobs += response.delta.logprobs
        else:
            answer.finished = response.finished
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    answer.text = "".join(answer.deltas)
    return answer


def ids_request(ids: Sequence[int], **fields: Any) -> pb.GenerateRequest:
    """A request whose prompt is token ids."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)
