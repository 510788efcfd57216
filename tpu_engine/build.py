"""Builds an engine from a configuration: model, weights, executables, scheduler, step loop.

Owns the order of start-up and its progress reports. The composition of the parts is all it does:
each part checks its own input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from buckets.compile_cache import CompileCache, NotWarm
from buckets.executable import ExecutableRecord
from buckets.plan import Plan
from tpu_engine.compile_store import open_store
from tpu_engine.config import EngineConfig
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.errors import InvalidConfig
from tpu_engine.kv_pages import PagePool
from tpu_engine.model_runner import ModelRunner
from tpu_engine.models.loading import load_weights
from tpu_engine.models.registry import family_of
from tpu_engine.models.weights_spec import expected_tensors
from tpu_engine.prepare import memory_plan_of, prepare, require_memory
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.step_plan import Runner
from tpu_engine.target import new_state
from tpu_engine.weights.open_model import OpenedModel, open_model
from tpu_engine.weights.source import check_tensors


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of start-up: `done` of `total` in a phase ("weights", "compile", "ready")."""

    phase: str
    done: int
    total: int
    detail: str


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A ready engine; `config` has every derived value filled in."""

    loop: EngineLoop
    runner: ModelRunner
    model: OpenedModel
    config: EngineConfig
    plan: Plan
    compile_count: Callable[[], int]


OnProgress = Callable[[Progress], None]


def build_engine(
    config: EngineConfig, progress: OnProgress | None = None, plan: Plan | None = None
) -> BuiltEngine:
    """Opens the model, loads weights, compiles every shape of the plan and freezes the cache.

    `plan` None reads the one that is configured, or derives one. Raises `InvalidConfig` or
    `InvalidModel` before anything large is allocated.
    """
    report = progress or _silent
    model = open_model(config.model)
    family = family_of(model.config)
    specs = family.weight_specs(model.config)
    check_tensors(model.source, expected_tensors(specs, model.config.num_layers))
    store = open_store(config)
    target = prepare(config, model.config, model.tokenizer.vocab_size, jax.devices(), plan)
    config = target.config
    executables = CompileCache(target, store, require_warm=config.require_warm)
    facts = executables.stored_facts(target.plan.shapes)
    require_memory(memory_plan_of(target, facts), target.devices[0])

    weights = load_weights(
        target.weights,
        specs,
        model.source,
        target.mesh,
        lambda name, done, total: report(Progress("weights", done, total, name)),
    )
    state = new_state(target)
    _build_all(executables, target.plan, report)

    runner = ModelRunner(weights, state, executables)

    def compile_count() -> int:
        return executables.compile_count

    loop = new_loop(config, target.plan, runner, compile_count)
    ready = f"{len(target.plan.shapes)} shapes, {config.num_pages} pages"
    report(Progress("ready", 1, 1, ready))
    return BuiltEngine(loop, runner, model, config, target.plan, compile_count)


def new_loop(
    config: EngineConfig, plan: Plan, runner: Runner, compile_count: Callable[[], int]
) -> EngineLoop:
    """A step loop with a scheduler and a page pool of its own, from a derived configuration."""
    assert config.num_pages is not None
    assert config.max_model_len is not None
    limits = SchedulerLimits(
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        max_waiting=config.max_waiting,
        max_chunk=config.max_chunk,
    )
    scheduler = Scheduler(plan, limits, PagePool(config.num_pages))
    return EngineLoop(scheduler, runner, config.overlap, compile_count)


def _build_all(executables: CompileCache, plan: Plan, report: OnProgress) -> None:
    """Loads or compiles every shape of the plan, and freezes the cache."""
    total = len(plan.shapes)
    report(Progress("compile", 0, total, "first shape"))
    try:
        for done, record in enumerate(executables.build(plan.shapes), start=1):
            report(Progress("compile", done, total, _summary(record)))
    except NotWarm as error:
        limit = "a cache that holds every program (tpu-engine warmup fills one)"
        raise InvalidConfig("require_warm", limit, str(error)) from error
    executables.freeze()


def _summary(record: ExecutableRecord) -> str:
    """One short line; shapes of one plan differ in tokens and sequences."""
    shape = f"tokens={record.shape.num_tokens} seqs={record.shape.num_seqs}"
    return f"{shape} {record.source} in {record.seconds:.1f} s {record.note}".rstrip()


def _silent(_: Progress) -> None:
    return None
