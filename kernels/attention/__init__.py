"""Ragged paged attention: public ops, their reference, their backends and the cache layout."""

from kernels.attention.api import ragged_paged_attention
from kernels.attention.dispatch import BACKENDS, AttentionWork, Backend, attention_work
from kernels.attention.mla import mla_ragged_paged_attention
from kernels.attention.xla import XlaWork

__all__ = [
    "BACKENDS",
    "AttentionWork",
    "Backend",
    "XlaWork",
    "attention_work",
    "mla_ragged_paged_attention",
    "ragged_paged_attention",
]
