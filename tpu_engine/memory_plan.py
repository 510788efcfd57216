"""What goes into a device's memory, before anything is put there: pages that fit, and a verdict.

Owns this arithmetic. Weights and pages are exact, as sharded and quantised. What a step needs
beside them is the compiler's figure where a program was compiled, and an allowance before that.
What only a device can tell (its runtime's share, fragmentation) is the configured `hbm_reserve`.
All bytes are per device. Knows no device and no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buckets.executable_facts import ExecutableFacts
from buckets.plan import Plan
from buckets.shape import StepShape
from tpu_engine.config import EngineConfig
from tpu_engine.derive import pages_per_seq
from tpu_engine.models.config import ModelConfig

CPU_KV_SHARE = 0.1  # of the machine's memory: others live there too
_FLOAT_BYTES = 4
# Copies of the activations of one layer that live at once: residual, normed, gate and up, product.
_LIVE_HIDDEN, _LIVE_FFN = 4, 3
# Logits, their sorted or masked forms and random numbers.
_LIVE_LOGITS = 4
# A program of ours is 2 to 6 MB on every chip; 24 of them and the small ones beside.
_CODE_BYTES_PER_SHAPE = 8 << 20


@dataclass(frozen=True, slots=True)
class ShapeMemory:
    """One shape's verdict.

    Attributes:
        is_compiled: the figures are the compiler's, not an allowance.
        fits: whether weights, pages, all programs and this shape's temporaries fit at once.
    """

    shape: StepShape
    temp_bytes: int
    code_bytes: int
    is_compiled: bool
    fits: bool


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where a device's memory goes.

    Attributes:
        capacity_bytes: of one device.
        reserve_bytes: left to the runtime and to fragmentation.
        page_bytes: one page, all layers, this device's share of the heads.
        advice: what to change where it doesn't fit, or "".
    """

    capacity_bytes: int
    reserve_bytes: int
    weight_bytes: int
    page_bytes: int
    num_pages: int
    shapes: tuple[ShapeMemory, ...]
    advice: str

    @property
    def kv_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def temp_bytes(self) -> int:
        """Of the shape that needs most: one step runs at a time."""
        return max(shape.temp_bytes for shape in self.shapes)

    @property
    def code_bytes(self) -> int:
        return sum(shape.code_bytes for shape in self.shapes)

    @property
    def free_bytes(self) -> int:
        """What stays free; negative where it doesn't fit."""
        used = self.weight_bytes + self.kv_bytes + self.temp_bytes + self.code_bytes
        return self.capacity_bytes - self.reserve_bytes - used

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What is known before a page is counted: one device's capacity, weights and page size."""

    capacity_bytes: int
    weight_bytes: int
    page_bytes: int


def kv_budget(
    config: EngineConfig, model: ModelConfig, plan: Plan, needs: DeviceNeeds, platform: str
) -> int:
    """Bytes for KV pages on one device: a function of the configuration and the chip alone.

    Warm-up node and server must agree on it, because the number of pages is part of every program.
    """
    if platform == "cpu":
        return int(needs.capacity_bytes * CPU_KV_SHARE)
    reserve = int(needs.capacity_bytes * config.hbm_reserve)
    temps = max(allowance(shape, model, config.tensor_parallel) for shape in plan.shapes)
    code = _CODE_BYTES_PER_SHAPE * len(plan.shapes)
    return needs.capacity_bytes - reserve - needs.weight_bytes - temps - code


def allowance(shape: StepShape, model: ModelConfig, num_devices: int) -> int:
    """Bytes a step of `shape` may need for temporaries, before a compiler was asked."""
    hidden = _LIVE_HIDDEN * model.hidden_size
    ffn = _LIVE_FFN * 2 * model.intermediate_size // num_devices
    heads = 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // num_devices
    logits = _LIVE_LOGITS * model.vocab_size * shape.num_logit_rows
    return _FLOAT_BYTES * (shape.num_tokens * (hidden + ffn + heads) + logits)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    plan: Plan,
    needs: DeviceNeeds,
    facts: Mapping[StepShape, ExecutableFacts],
) -> MemoryPlan:
    """The memory plan of a derived configuration; `facts` are of the shapes compiled so far."""
    assert config.num_pages is not None
    reserve = int(needs.capacity_bytes * config.hbm_reserve)
    temps = {
        shape: facts[shape].temp_bytes
        if shape in facts
        else allowance(shape, model, config.tensor_parallel)
        for shape in plan.shapes
    }
    codes = {
        shape: facts[shape].code_bytes if shape in facts else _CODE_BYTES_PER_SHAPE
        for shape in plan.shapes
    }
    fixed = reserve + needs.weight_bytes + sum(codes.values())
    kv = needs.page_bytes * config.num_pages
    shapes = tuple(
        ShapeMemory(
            shape,
            temps[shape],
            codes[shape],
            shape in facts,
            fixed + kv + temps[shape] <= needs.capacity_bytes,
        )
        for shape in plan.shapes
    )
    room = needs.capacity_bytes - fixed - max(temps.values())
    return MemoryPlan(
        capacity_bytes=needs.capacity_bytes,
        reserve_bytes=reserve,
        weight_bytes=needs.weight_bytes,
        page_bytes=needs.page_bytes,
        num_pages=config.num_pages,
        shapes=shapes,
        advice="" if room >= kv else _advice(config, room // needs.page_bytes),
    )


def _advice(config: EngineConfig, fitting_pages: int) -> str:
    """What to lower so that it fits: as many pages as there is room for."""
    longest = pages_per_seq(config)
    if fitting_pages > longest:
        seqs = (fitting_pages - 1) // longest
        both = f"lower num_pages to {fitting_pages:,}"
        if seqs < config.max_num_seqs:
            both += f", or max_num_seqs to {seqs} (all of them at max_model_len)"
        return both
    if fitting_pages > 1:
        length = (fitting_pages - 1) * config.page_size
        return f"lower max_model_len to {length:,}, or use more devices or int8 weights"
    return "the weights leave no room for pages: use more devices or int8 weights"
