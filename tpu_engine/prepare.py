"""From options and a model's configuration to a target: everything decided, nothing allocated.

Owns the order in which the open options are decided. Serving and warm-up come through here, so
that a node without a device decides what the device's host will decide.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from buckets.cost import CostModel
from buckets.executable_facts import ExecutableFacts
from buckets.plan import Plan
from buckets.shape import StepShape
from kernels.chips import chip_of
from tpu_engine.config import EngineConfig
from tpu_engine.derive import derive, plan_limits, with_pages
from tpu_engine.errors import InvalidConfig
from tpu_engine.kernel_choice import choose_kernels
from tpu_engine.memory_plan import DeviceNeeds, MemoryPlan, kv_budget, plan_memory
from tpu_engine.models.config import ModelConfig
from tpu_engine.models.sharding import make_mesh
from tpu_engine.plans import choose_plan, open_plan
from tpu_engine.step_cost import roofline_of
from tpu_engine.target import StepTarget, make_target, placed_weights


def prepare(
    config: EngineConfig,
    model: ModelConfig,
    num_token_ids: int,
    devices: Sequence[Any],
    plan: Plan | None = None,
) -> StepTarget:
    """The target of `config` on `devices`; its own `config` has every derived value filled in.

    `plan` None reads the configured one or derives one. Raises `InvalidConfig` for what can't be.
    """
    device = devices[0]
    mesh = make_mesh(config.tensor_parallel, list(devices))
    config = derive(config, model, device.platform)
    choice = choose_kernels(config, model, num_token_ids, device.device_kind)
    limits = plan_limits(config)
    plan = choose_plan(config, limits) if plan is None else plan
    plan.validate(limits)
    needs = DeviceNeeds(
        capacity_bytes=capacity_bytes(device, mesh.size),
        weight_bytes=bytes_per_device(placed_weights(config, model, mesh)),
        page_bytes=choice.layout.page_bytes(model.num_layers) // config.tensor_parallel,
    )
    budget = kv_budget(config, model, plan, needs, device.platform)
    config = with_pages(config, needs.page_bytes, budget)
    return make_target(config, model, plan, choice, num_token_ids, devices)


def memory_plan_of(target: StepTarget, facts: Mapping[StepShape, ExecutableFacts]) -> MemoryPlan:
    """Where the memory of each of the target's devices goes."""
    layout = target.choice.layout
    needs = DeviceNeeds(
        capacity_bytes=capacity_bytes(target.devices[0], target.mesh.size),
        weight_bytes=bytes_per_device(target.weights),
        page_bytes=layout.page_bytes(target.model.num_layers) // target.config.tensor_parallel,
    )
    return plan_memory(target.config, target.model, target.plan, needs, facts)


def cost_model_of(target: StepTarget) -> CostModel:
    """A cost model that knows the model, the chip and the configured plan file's profile."""
    config, device = target.config, target.devices[0]
    page_bytes = target.choice.layout.page_bytes(target.model.num_layers)
    roofline = roofline_of(
        target.model,
        None if device.platform == "cpu" else chip_of(device.device_kind),
        num_shards=config.tensor_parallel,
        weight_bytes=bytes_per_device(target.weights),
        kv_token_bytes=page_bytes / config.page_size / config.tensor_parallel,
    )
    if config.plan is None:
        return CostModel(roofline)
    return CostModel(roofline, open_plan(config, plan_limits(config)).profile)


def require_memory(plan: MemoryPlan, device: Any) -> None:
    """Raises `InvalidConfig` with what to change where the plan, or the device itself, says no."""
    if not plan.fits:
        short = -plan.free_bytes / (1 << 20)
        raise InvalidConfig(
            "num_pages", f"such that all fits: {plan.advice}", f"{short:,.0f} MiB too much"
        )
    limit = ((device.memory_stats() if device.platform == "tpu" else None) or {}).get("bytes_limit")
    needed = plan.capacity_bytes - plan.reserve_bytes - plan.free_bytes
    if limit is not None and needed > limit:
        raise InvalidConfig(
            "hbm_reserve",
            f"larger: this device offers {limit:,} bytes of {plan.capacity_bytes:,}, "
            f"and {needed:,} are planned",
            round(plan.reserve_bytes / plan.capacity_bytes, 3),
        )


def capacity_bytes(device: Any, num_devices: int) -> int:
    """Memory of a device by its kind; for a CPU its share of the machine's."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices
    try:
        return chip_of(device.device_kind).hbm_bytes
    except ValueError as error:
        limit = f"one whose devices have a known memory ({error})"
        raise InvalidConfig("device", limit, device.device_kind) from error


def bytes_per_device(tree: nnx.State) -> int:
    """Bytes of one device's share of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
