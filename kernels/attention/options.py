"""What one layer of a call may ask for besides plain causal attention.

Owns `LayerData` (values that are data, so alternating layers share one program) and how the op's
arguments become a `Scoring`. Knows no backend.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kernels.attention.geometry import Scoring

TREE_BITS = 32  # a tree mask is one int32 per token


class LayerData(NamedTuple):
    """Per-layer values that are data; a field is None where `Scoring` says it is not used.

    Attributes:
        layer: the layer of the cache to write and read.
        window: how many positions, its own included, a query sees; 0 means all.
        sinks: joins each query head's softmax denominator as `exp(sink)`.
        tree: bit j of a token in a row of at most `decode_queries` new tokens: it sees the row's
            j-th new token. Older positions are always seen, later tokens never. Longer rows are
            causal whatever their bits.
    """

    layer: Int[Array, ""]
    window: Int[Array, ""] | None = None
    sinks: Float[Array, "N"] | None = None
    tree: Int[Array, "T"] | None = None


def scoring_of(data: LayerData, scale: float, soft_cap: float | None) -> Scoring:
    """The static half of a layer's options; raises `ValueError` for values that can't apply."""
    for name, given in (("scale", scale), ("soft_cap", soft_cap)):
        if given is not None and not isinstance(given, Real):
            raise ValueError(f"{name} must be a number known at trace time, got {given!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be positive (None: no cap), got {soft_cap}")
    return Scoring(
        scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        has_window=data.window is not None,
        has_sinks=data.sinks is not None,
        has_tree=data.tree is not None,
    )
