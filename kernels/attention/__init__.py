"""Ragged paged attention: one public op, its reference, its backends and its cache layout."""

from kernels.attention.api import BACKENDS, Backend, ragged_paged_attention
from kernels.attention.xla import XlaWork, attention_work

__all__ = ["BACKENDS", "Backend", "XlaWork", "attention_work", "ragged_paged_attention"]
