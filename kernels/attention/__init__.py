"""Ragged paged attention: one public op, its reference, its backends and its cache layout."""

from kernels.attention.api import BACKENDS, Backend, attention_work, ragged_paged_attention

__all__ = ["BACKENDS", "Backend", "attention_work", "ragged_paged_attention"]
