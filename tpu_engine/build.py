"""Builds an engine from a configuration: model, weights, executables, scheduler, step loop.

Owns the order of start-up and its progress reports. The composition of the parts is all it does:
each part checks its own input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from buckets.cache_store import CacheStore
from buckets.compile_cache import CompileCache, NotWarm
from buckets.cost import CostModel
from buckets.executable import ExecutableRecord
from buckets.plan import Plan
from buckets.shape import StepShape
from buckets.warm_order import opening_shapes, warm_order
from tpu_engine.canary import (
    Answer,
    Canary,
    answer_name,
    check_shapes,
    compare_with_earlier,
    tolerance_of,
    weights_fingerprint,
)
from tpu_engine.compile_store import open_store
from tpu_engine.config import EngineConfig
from tpu_engine.engine_loop import EngineLoop
from tpu_engine.errors import InvalidConfig
from tpu_engine.kv_pages import PagePool
from tpu_engine.misses import MissLog
from tpu_engine.model_runner import ModelRunner
from tpu_engine.models.loading import load_weights
from tpu_engine.models.registry import family_of
from tpu_engine.models.weights_spec import expected_tensors
from tpu_engine.prepare import cost_model_of, memory_plan_of, prepare, require_memory
from tpu_engine.scheduler import Scheduler, SchedulerLimits
from tpu_engine.state_program import new_state
from tpu_engine.step_plan import Runner
from tpu_engine.step_program import StepState
from tpu_engine.target import StepTarget
from tpu_engine.warm_progress import WarmProgress, short_name
from tpu_engine.weights.open_model import OpenedModel, open_model
from tpu_engine.weights.source import check_tensors


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of start-up: `done` of `total` in a phase.

    Phases are "weights", "compile", "canary" and "ready". `current` is the shape at work,
    `seconds_left` an estimate for the rest of the phase; None where there is none.
    """

    phase: str
    done: int
    total: int
    detail: str
    current: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A ready engine; `config` has every derived value filled in.

    `plan` is the whole plan; `loop` plans with those of its shapes that are in `executables`.
    """

    loop: EngineLoop
    runner: ModelRunner
    model: OpenedModel
    config: EngineConfig
    plan: Plan
    compile_count: Callable[[], int]
    executables: CompileCache
    misses: MissLog


OnProgress = Callable[[Progress], None]


def build_engine(
    config: EngineConfig,
    progress: OnProgress | None = None,
    plan: Plan | None = None,
    *,
    partial: bool = False,
) -> BuiltEngine:
    """Opens the model, loads weights, compiles every shape of the plan and freezes the cache.

    `plan` None reads the one that is configured, or derives one. `partial` stops at the shapes a
    server can open with; whoever asks for that warms the rest. Raises `InvalidConfig` or
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
    state, first = _warm(executables, target, store, partial, report)
    misses = MissLog()
    runner = ModelRunner(weights, state, executables, misses, config.on_miss)
    if config.canary:
        answer = _run_canary(target, first, runner, report)
        name = answer_name(weights_fingerprint(model.source), _numeric_options(config))
        compare_with_earlier(answer, name, tolerance_of(config, jax.default_backend()), store)

    def compile_count() -> int:
        return executables.compile_count

    loop = new_loop(config, first, runner, compile_count, cost_model_of(target))
    counts = f"{len(first.shapes)} of {len(target.plan.shapes)} shapes, {config.num_pages} pages"
    report(Progress("ready", 1, 1, counts))
    return BuiltEngine(loop, runner, model, config, target.plan, compile_count, executables, misses)


def new_loop(
    config: EngineConfig,
    plan: Plan,
    runner: Runner,
    compile_count: Callable[[], int],
    cost: CostModel | None = None,
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
    return EngineLoop(scheduler, runner, config.overlap, compile_count, cost)


def _warm(
    executables: CompileCache,
    target: StepTarget,
    store: CacheStore | None,
    partial: bool,
    report: OnProgress,
) -> tuple[StepState, Plan]:
    """Loads or compiles every shape or those to open with, and allocates the state.

    Returns the plan that these shapes make.
    """
    plan = target.plan
    shapes = opening_shapes(plan) if partial else warm_order(plan)
    seen = WarmProgress(shapes)
    current = short_name(seen.current)
    report(Progress("compile", 0, seen.total, "first shape", current))
    try:
        for record in executables.build(shapes):
            seen.note(record.shape, record.source, record.seconds)
            current, left_s = short_name(seen.current), seen.seconds_left
            done, total = seen.done, seen.total
            report(Progress("compile", done, total, _summary(record), current, left_s))
        # After the steps: where a warm cache is required, those are the ones to be told of.
        state, _ = new_state(target, store, require_warm=target.config.require_warm)
    except NotWarm as error:
        limit = "a cache that holds every program (tpu-engine warmup fills one)"
        raise InvalidConfig("require_warm", limit, str(error)) from error
    executables.freeze(plan.shapes)
    return state, Plan.of(shapes)


def _run_canary(target: StepTarget, plan: Plan, runner: ModelRunner, report: OnProgress) -> Answer:
    """Runs the plan's programs once on known tokens; raises `CanaryFailed` where they disagree."""
    config, shapes = target.config, plan.shapes
    assert config.num_pages is not None
    in_one_step = config.attention == "xla"
    canary = Canary(runner, target.num_token_ids, config.num_pages, config.page_size, in_one_step)
    tolerance = tolerance_of(config, target.devices[0].platform)

    def on_shape(done: int, shape: StepShape) -> None:
        report(Progress("canary", done, len(shapes), short_name(shape)))

    return check_shapes(canary, shapes, tolerance, on_shape)


def _numeric_options(config: EngineConfig) -> dict[str, object]:
    """What decides the numbers of a step beside the weights."""
    names = ("dtype", "kv_dtype", "quantize", "attention")
    return {name: getattr(config, name) for name in names}


def _summary(record: ExecutableRecord) -> str:
    """One short line."""
    name = short_name(record.shape)
    return f"{name} {record.source} in {record.seconds:.1f} s {record.note}".rstrip()


def _silent(_: Progress) -> None:
    return None
