"""Ragged paged attention: public ops, their reference, their backends and the cache layout."""

from kernels.attention.api import ragged_paged_attention
from kernels.attention.dispatch import BACKENDS, AttentionWork, Backend, attention_work
from kernels.attention.mla import mla_ragged_paged_attention
from kernels.attention.pallas.attention import KernelPlan, plan_kernels, small_plan

__all__ = [
    "BACKENDS",
    "AttentionWork",
    "Backend",
    "KernelPlan",
    "attention_work",
    "mla_ragged_paged_attention",
    "plan_kernels",
    "ragged_paged_attention",
    "small_plan",
]
