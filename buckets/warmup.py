"""Compiles many programs ahead of time, in worker processes, into a store.

Owns the workers: how many run, what each one does, and that one which dies takes nothing but its
own shape with it (a compiler that fails may end the process). Any number of warm-ups may fill one
store: a program that another process is at work on is left to it. Knows no devices and no model.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import jax

from buckets.cache_store import CacheStore, Stored
from buckets.executable import ExecutableSource, Programs
from buckets.executable_facts import ExecutableFacts
from buckets.shape import StepShape

Opener = Callable[[], tuple[Programs, CacheStore]]
Outcome = Literal["built", "reused", "failed"]
_MOST_WORDS = 400  # of an error: compilers repeat whole instructions
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class WarmedShape:
    """What became of one shape.

    Attributes:
        outcome: "reused" where the store had it, or another process built it meanwhile.
        seconds: of this shape's worker.
        note: why it failed, or what went wrong on the way.
    """

    shape: StepShape
    outcome: Outcome
    seconds: float
    facts: ExecutableFacts | None = None
    note: str = ""


class WorkerLost(RuntimeError):
    """A worker process ended before it could take any work; says with which last words."""


def already_stored(
    programs: Programs, store: CacheStore, shapes: Iterable[StepShape]
) -> dict[StepShape, ExecutableFacts]:
    """The shapes whose entries are whole, found without lowering; damaged ones are set aside."""
    source = ExecutableSource(programs, store)
    found = source.stored_facts(shapes)
    return {
        shape: facts
        for shape, facts in found.items()
        if isinstance(store.read(source.key(shape).digest()), Stored)
    }


def warm_up(opener: Opener, shapes: Iterable[StepShape], jobs: int = 1) -> Iterator[WarmedShape]:
    """Compiles what the store lacks of `shapes`, in the order they get done.

    `opener` must be picklable: every worker opens programs and store for itself. Raises
    `WorkerLost` where a worker can't even do that. Workers end with the iterator.
    """
    waiting = deque((shape, False) for shape in shapes)
    with tempfile.TemporaryDirectory(prefix="tpu-engine-warmup-") as folder:
        pool = _Pool(opener, Path(folder))
        try:
            while waiting or pool.is_busy:
                while waiting and pool.num_busy < jobs:
                    pool.start(*waiting.popleft())
                for done in pool.finished():
                    if done.outcome is None:  # another process is at it: look again at the end
                        waiting.append((done.shape, True))
                    else:
                        yield WarmedShape(
                            done.shape, done.outcome, done.seconds, done.facts, done.note
                        )
        finally:
            pool.close()


@dataclass(frozen=True, slots=True)
class _Done:
    """A worker's answer; outcome None: somebody else holds the claim."""

    shape: StepShape
    outcome: Outcome | None
    seconds: float
    facts: ExecutableFacts | None = None
    note: str = ""


class _Worker:
    """One process, its pipe, and the shape it works on."""

    def __init__(self, opener: Opener, words: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._words = words
        arguments = (opener, other, str(words))
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        other.close()  # so that its end is an end of file here
        self.is_open = False
        self.shape: StepShape | None = None
        self.started_s = 0.0

    def give(self, shape: StepShape, patient: bool) -> None:
        self.shape, self.started_s = shape, time.monotonic()
        self.connection.send((shape, patient))

    def last_words(self) -> str:
        """The end of what the process wrote to stderr, on one line."""
        self._process.join(_STOP_S)
        text = self._words.read_text(errors="replace") if self._words.exists() else ""
        words = " ".join(line.strip() for line in text.splitlines()[-20:])
        code = self._process.exitcode
        return f"the compiling process ended with code {code}: {words[-_MOST_WORDS:] or 'no word'}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()


class _Pool:
    """Workers made when they are needed; one that died is replaced by the next that is needed."""

    def __init__(self, opener: Opener, folder: Path) -> None:
        self._opener = opener
        self._folder = folder
        self._workers: list[_Worker] = []
        self._num_started = 0

    @property
    def num_busy(self) -> int:
        return sum(worker.shape is not None for worker in self._workers)

    @property
    def is_busy(self) -> bool:
        return self.num_busy > 0

    def start(self, shape: StepShape, patient: bool) -> None:
        """Gives a shape to an idle worker; `patient` ones wait for who holds the claim."""
        idle = [worker for worker in self._workers if worker.shape is None]
        if not idle:
            self._num_started += 1
            idle = [_Worker(self._opener, self._folder / str(self._num_started))]
            self._workers += idle
        idle[0].give(shape, patient)

    def finished(self) -> list[_Done]:
        """Waits for answers; a worker that died is an answer too."""
        busy = [worker for worker in self._workers if worker.shape is not None]
        ready = wait([worker.connection for worker in busy])
        answers = [self._answer(worker) for worker in busy if worker.connection in ready]
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    def _answer(self, worker: _Worker) -> _Done | None:
        assert worker.shape is not None
        try:
            answer: Any = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._workers.remove(worker)
            words = worker.last_words()
            worker.stop()
            if not worker.is_open:
                raise WorkerLost(words) from None
            return _Done(worker.shape, "failed", time.monotonic() - worker.started_s, None, words)
        if answer is None:  # programs and store are open; time that shape alone
            worker.is_open, worker.started_s = True, time.monotonic()
            return None
        worker.shape = None
        return answer


def _work(opener: Opener, connection: Connection, words: str) -> None:
    """The worker process: opens, then compiles what it is given until the pipe ends."""
    # Compilers write to the descriptor itself; it would tear up the parent's progress bar.
    file = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 2)
    programs, store = opener()
    source = ExecutableSource(programs, store)
    connection.send(None)
    while True:
        try:
            shape, patient = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        connection.send(_warm(source, store, shape, patient))


def _warm(source: ExecutableSource, store: CacheStore, shape: StepShape, patient: bool) -> _Done:
    started = time.monotonic()
    with store.claim(source.recipe_digest(shape), patient=patient) as is_ours:
        if not is_ours:
            return _Done(shape, None, 0.0)
        try:
            record, is_new = source.compile_missing(shape)
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            note = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_WORDS]
            return _Done(shape, "failed", time.monotonic() - started, None, note)
    if is_new and "not stored" in record.note:
        return _Done(shape, "failed", record.seconds, record.facts, record.note)
    return _Done(shape, "built" if is_new else "reused", record.seconds, record.facts, record.note)
