"""Which device ops an engine runs: attention backend, cache layout, the kernels' blocks, sampling.

Owns the choice, made once before anything large is allocated. Knows no step and no model code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import kernels.sampling
from kernels.attention import Backend, KernelPlan, plan_kernels, small_plan
from kernels.attention.cache_layout import KvLayout, kv_layout
from kernels.attention.geometry import Scoring
from kernels.chips import LANES, chip_of
from kernels.sampling.pallas import vmem_bytes
from tpu_engine.config import EngineConfig
from tpu_engine.errors import InvalidConfig
from tpu_engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The choice.

    Attributes:
        attention: backend of `ragged_paged_attention`.
        layout: of the whole cache; each device holds the rows of its heads.
        plan: blocks of the attention kernels; None where no kernel runs.
        sampling: backend of `sampling_cutoffs`.
    """

    attention: Backend
    layout: KvLayout
    plan: KernelPlan | None = None
    sampling: kernels.sampling.Backend = "xla"


def choose_kernels(
    config: EngineConfig, model: ModelConfig, num_token_ids: int, device_kind: str
) -> KernelChoice:
    """The choice for a derived configuration.

    Raises `InvalidConfig` where the kernels can't run it: page size, heads, or a chip nobody knows.
    """
    backend = cast(Backend, config.attention)
    with_kernels = backend.startswith("pallas")
    try:
        layout = kv_layout(
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=config.page_size,
            dtype=config.kv_dtype,
            lanes=LANES if with_kernels else 1,
            num_shards=config.tensor_parallel,
        )
        if not with_kernels:
            return KernelChoice(backend, layout)
        shards = config.tensor_parallel
        geometry = layout.per_shard(shards).geometry(model.num_heads // shards, config.dtype)
        scoring = Scoring(scale=model.head_dim**-0.5)
        if backend == "pallas-interpret":
            return KernelChoice(backend, layout, small_plan(geometry, scoring), backend)
        chip = chip_of(device_kind)
        plan = plan_kernels(geometry, scoring, chip)
        fits = vmem_bytes(num_token_ids) <= chip.vmem_bytes
        return KernelChoice(backend, layout, plan, "pallas" if fits else "xla")
    except ValueError as error:
        raise InvalidConfig("attention", f"one that can run this ({error})", backend) from error
