"""What the ops refuse at trace time, each error naming both sides.

Owns shapes and dtypes that don't fit together. Values of arrays are data and can't be seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kernels.attention.cache_layout import KvLayout
from kernels.attention.geometry import QUERY_DTYPES
from kernels.attention.options import TREE_BITS, LayerData
from kernels.attention.quantize import is_quantized
from kernels.attention.ragged import BatchTables


def check_ranks(ranks: Mapping[str, tuple[Array, int]]) -> None:
    """Each array has the number of dimensions it should have, and is not empty."""
    for name, (array, rank) in ranks.items():
        _, shape = _kind(name, array)
        if len(shape) != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got shape {shape}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty, got shape {shape}")


def _kind(name: str, array: Any) -> tuple[jnp.dtype, tuple[int, ...]]:
    """Dtype and shape of what should be an array."""
    if array is None or isinstance(array, list | tuple | str):
        raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    return jnp.result_type(array), jnp.shape(array)


def check_queries(named: Mapping[str, Array]) -> None:
    """Queries, new keys and new values have one dtype, and one that attention computes with."""
    names, dtypes = ", ".join(named), [array.dtype for array in named.values()]
    if len(set(dtypes)) > 1:
        raise ValueError(f"{names} differ in dtype: {', '.join(map(str, dtypes))}")
    if str(dtypes[0]) not in QUERY_DTYPES:
        raise ValueError(f"{names} must be {' or '.join(QUERY_DTYPES)}, got {dtypes[0]}")


def check_tables(tables: BatchTables, data: LayerData) -> None:
    """Tables agree in rows, and every index is an int32."""
    check_ranks(
        {
            "page_table": (tables.page_table, 2),
            "kv_lens": (tables.kv_lens, 1),
            "cu_q_lens": (tables.cu_q_lens, 1),
            "num_seqs": (tables.num_seqs, 0),
            "layer": (data.layer, 0),
        }
    )
    rows = tables.page_table.shape[0]
    if tables.kv_lens.shape != (rows,) or tables.cu_q_lens.shape != (rows + 1,):
        raise ValueError(
            f"page_table has {rows} rows, so kv_lens must be [{rows}] and cu_q_lens "
            f"[{rows + 1}], got {tables.kv_lens.shape} and {tables.cu_q_lens.shape}"
        )
    for name, array in (*tables._asdict().items(), ("layer", data.layer)):
        if jnp.result_type(array) != jnp.int32:
            raise ValueError(f"{name} must be int32, got {jnp.result_type(array)}")


def check_cache(cache: Array, layout: KvLayout) -> None:
    """The cache lies as the layout says."""
    check_ranks({"cache": (cache, 6)})
    if str(cache.dtype) != layout.dtype:
        raise ValueError(f"cache is {cache.dtype}, its layout says {layout.dtype}")
    right = layout.shape(*cache.shape[:2])
    if cache.shape != right:
        raise ValueError(f"cache must be [L, P, planes, R, S, width] = {right}, got {cache.shape}")


def check_layer_data(data: LayerData, num_tokens: int, num_heads: int, decode_queries: int) -> None:
    """Window, sinks and tree have the shapes and dtypes of this batch."""
    if not isinstance(decode_queries, int) or not 1 <= decode_queries <= TREE_BITS:
        raise ValueError(f"decode_queries must be 1..{TREE_BITS}, got {decode_queries}")
    for name, array, shape, kind in (
        ("window", data.window, (), jnp.int32),
        ("sinks", data.sinks, (num_heads,), jnp.float32),
        ("tree", data.tree, (num_tokens,), jnp.int32),
    ):
        if array is None:
            continue
        given = _kind(name, array)
        if given != (kind, shape):
            raise ValueError(
                f"{name} must be {jnp.dtype(kind).name} {list(shape)}, got "
                f"{given[0]} {list(given[1])}"
            )
    if data.tree is not None and decode_queries == 1:
        raise ValueError(
            f"a tree applies to rows of at most decode_queries new tokens: give 2..{TREE_BITS}"
        )


def check_scales(scales: Mapping[str, Array | None], cache_dtype: str, shape: tuple[int, ...]):
    """Scales come for all or none; int8 needs them, a cache that isn't quantised refuses them."""
    names, given = " and ".join(scales), [s for s in scales.values() if s is not None]
    if 0 < len(given) < len(scales):
        missing = ", ".join(name for name, scale in scales.items() if scale is None)
        raise ValueError(f"{names} go together, {missing} is missing")
    if cache_dtype == "int8" and not given:
        raise ValueError(f"an int8 cache needs {names}")
    if given and not is_quantized(jnp.dtype(cache_dtype)):
        raise ValueError(f"{names} apply to 8-bit caches, got {cache_dtype}")
    for name, scale in scales.items():
        dtype, given_shape = _kind(name, scale) if scale is not None else (jnp.float32, shape)
        if (dtype, given_shape) != (jnp.float32, shape):
            raise ValueError(
                f"{name} must be float32 {list(shape)}, got {dtype} {list(given_shape)}"
            )
