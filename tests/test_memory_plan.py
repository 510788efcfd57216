"""Memory before anything is allocated: the arithmetic, its advice, and what really is allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.executable_facts import ExecutableFacts
from buckets.plan import default_plan
from tests import tiny_model
from tpu_engine.config import EngineConfig
from tpu_engine.derive import plan_limits, with_pages
from tpu_engine.errors import InvalidConfig
from tpu_engine.memory_plan import DeviceNeeds, MemoryPlan, kv_budget, plan_memory
from tpu_engine.models.config import ModelConfig
from tpu_engine.prepare import require_memory

GIB = 1 << 30
LLAMA_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_model_len=131072,
)
CONFIG = EngineConfig(
    "m", max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2048, page_size=128
)
NEEDS = DeviceNeeds(capacity_bytes=16 * GIB, weight_bytes=2 * GIB, page_bytes=2 << 20)


def planned(config: EngineConfig, needs: DeviceNeeds = NEEDS, temp_bytes: int = 0) -> MemoryPlan:
    shapes = default_plan(plan_limits(config))
    one = ExecutableFacts(0, 0, 0, 0, 0, temp_bytes, 4 << 20, 0, 0, None, {})
    facts = dict.fromkeys(shapes.shapes, one) if temp_bytes else {}
    return plan_memory(config, LLAMA_8B, shapes, needs, facts)


def derived(config: EngineConfig, needs: DeviceNeeds = NEEDS) -> EngineConfig:
    shapes = default_plan(plan_limits(config))
    return with_pages(config, needs.page_bytes, kv_budget(config, LLAMA_8B, shapes, needs, "tpu"))


@given(st.integers(8, 96), st.integers(1, 3), st.floats(0, 0.5))
def test_derived_pages_always_fit(capacity: int, weights: int, reserve: float) -> None:
    needs = DeviceNeeds(capacity * GIB, weights * GIB // 2, 2 << 20)
    config = derived(replace(CONFIG, hbm_reserve=reserve), needs)
    plan = planned(config, needs)
    assert plan.fits
    assert all(shape.fits for shape in plan.shapes)
    assert plan.advice == ""


def test_more_pages_than_fit_are_refused_with_what_does_fit() -> None:
    most = derived(CONFIG).num_pages
    assert most is not None
    plan = planned(replace(CONFIG, num_pages=2 * most))
    assert not plan.fits
    assert f"lower num_pages to {most:,}" in plan.advice
    seqs = (most - 1) // 32
    assert f"max_num_seqs to {seqs}" in plan.advice
    with pytest.raises(InvalidConfig, match="lower num_pages to"):
        require_memory(plan, jax.devices()[0])
    assert planned(replace(CONFIG, num_pages=most)).fits


def test_advice_for_too_little_memory() -> None:
    pages = replace(CONFIG, num_pages=8192)
    tight = planned(pages, replace(NEEDS, capacity_bytes=7 * GIB, weight_bytes=4980 << 20))
    assert "lower max_model_len to" in tight.advice
    full = planned(pages, replace(NEEDS, weight_bytes=17 * GIB))
    assert "leave no room" in full.advice


def test_the_compilers_figures_replace_the_allowance() -> None:
    config = derived(CONFIG)
    assert not any(shape.is_compiled for shape in planned(config).shapes)
    huge = planned(config, temp_bytes=15 * GIB)
    assert all(shape.is_compiled and not shape.fits for shape in huge.shapes)
    assert huge.temp_bytes == 15 * GIB
    assert not huge.fits


def test_reserve_and_pages_are_all_there_is() -> None:
    plan = planned(derived(CONFIG))
    used = plan.weight_bytes + plan.kv_bytes + plan.temp_bytes + plan.code_bytes
    assert plan.free_bytes + used + plan.reserve_bytes == plan.capacity_bytes


# Sees two devices; prints planned and really allocated bytes of the first one.
_ALLOCATE = """
import sys
import jax
from tpu_engine.build import build_engine
from tpu_engine.config import EngineConfig
from tpu_engine.prepare import memory_plan_of, prepare
from tpu_engine.weights.open_model import describe_model

model, quantize, devices = sys.argv[1:]
config = EngineConfig(
    model,
    quantize=quantize,
    tensor_parallel=int(devices),
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=64,
)
described = describe_model(model)
target = prepare(config, described.config, described.num_token_ids, jax.devices())
plan = memory_plan_of(target, {})
built = build_engine(config)
first = jax.devices()[0]
shards = [s for array in jax.live_arrays() for s in array.addressable_shards if s.device == first]
print(plan.weight_bytes + plan.kv_bytes, sum(shard.data.nbytes for shard in shards))
"""


@pytest.mark.parametrize(("quantize", "devices"), [("none", "1"), ("int8", "1"), ("none", "2")])
def test_planned_bytes_are_what_is_allocated(
    tmp_path: Path, repo_root: Path, quantize: str, devices: str
) -> None:
    model = tiny_model.write_hf(tmp_path)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", _ALLOCATE, str(model), quantize, devices]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=repo_root, env=environment
    )
    planned_bytes, allocated_bytes = map(int, done.stdout.split())
    assert planned_bytes == pytest.approx(allocated_bytes, rel=0.02)
