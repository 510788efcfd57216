"""The static facts of one attention layer that a kernel is compiled for.

Owns `Geometry` (what the arrays look like to a kernel, after lane packing) and `Scoring` (how a
score becomes a weight). Both are hashable, so they can be static arguments. Loads no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

QUERY_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and dtypes of one layer as a kernel sees them.

    Attributes:
        num_q_heads: N, query heads on this device.
        num_kv_heads: K, key planes of a page on this device; divides N.
        key_width: lanes of a key row (and of a query row), a multiple of 128.
        value_width: lanes of a value row (and of an output row), a multiple of 128.
        page_size: S, positions per page.
        q_dtype, kv_dtype: NumPy names ("bfloat16", "float32", "int8", "float8_e4m3fn").
        latent: the page has no value plane: a value is the first `value_width` lanes of the key
            (multi-head latent attention, arXiv:2405.04434).
    """

    num_q_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    page_size: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_planes(self) -> int:
        """Planes of a page: K and V, or one shared plane."""
        return 1 if self.latent else 2


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a score becomes a weight; what is `True` here takes its values from data.

    Attributes:
        scale: factor on `q . k`.
        soft_cap: `c` of `c * tanh(score / c)` applied after the scale; None leaves scores alone.
        has_window: a per-layer int32 says how many positions up to and including its own a query
            sees (0: all of them).
        has_sinks: a float32 per query head joins the softmax denominator as `exp(sink)`.
        has_tree: an int32 per token says which new tokens of its own sequence it sees: bit j set
            means the j-th; older positions are always seen.
    """

    scale: float
    soft_cap: float | None = None
    has_window: bool = False
    has_sinks: bool = False
    has_tree: bool = False
