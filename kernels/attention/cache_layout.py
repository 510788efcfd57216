"""The layout of the paged KV cache: the one place that says where a token's K and V lie.

The cache of all layers of one KV group is a single array `[L, P, 2, K, S, H]`:

    L  layers                         2  plane 0 is K, plane 1 is V
    P  pages; page 0 is the null page K  KV heads (the axis tensor parallelism shards)
    S  token positions per page       H  head dimension

Position `p` of a sequence lies in slot `p % S` of page `page_table[seq, p // S]`. A page of one
layer is contiguous (one transfer moves it), and nothing is transposed between write and read.
Slots nobody owns hold garbage, NaN included. Knows nothing of who owns a page.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

K_PLANE = 0
V_PLANE = 1
NULL_PAGE = 0
KV_HEAD_AXIS = 3


def kv_cache_shape(
    *, num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Returns the shape `[L, P, 2, K, S, H]`; `num_pages` includes the null page."""
    return (num_layers, num_pages, 2, num_kv_heads, page_size, head_dim)


def kv_page_bytes(
    *, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, itemsize: int
) -> int:
    """Returns the bytes one page takes across all layers, K and V together."""
    return num_layers * 2 * num_kv_heads * page_size * head_dim * itemsize


def write_kv(
    cache: Float[Array, "L P 2 K S H"],
    layer: Int[Array, ""],
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
) -> Float[Array, "L P 2 K S H"]:
    """Writes one token's K and V per row of `keys`; rows that are padding name the null page."""
    planes = jnp.stack([keys, values], axis=1).astype(cache.dtype)  # [T, 2, K, H]
    return cache.at[layer, pages, :, :, slots].set(planes, mode="promise_in_bounds")


def read_kv_block(
    cache: Float[Array, "L P 2 K S H"], layer: Int[Array, ""], pages: Int[Array, "G W"]
) -> tuple[Float[Array, "G K WS H"], Float[Array, "G K WS H"]]:
    """Gathers a block of pages per group member: K and V of `W * S` positions, heads leading."""
    num_members, num_pages = pages.shape
    num_heads, page_size, head_dim = cache.shape[3:]
    heads = jnp.arange(num_heads)[None, :, None]

    def gather(plane: int) -> Float[Array, "G K WS H"]:
        rows = cache.at[layer, pages[:, None, :], plane, heads].get(mode="promise_in_bounds")
        return rows.reshape(num_members, num_heads, num_pages * page_size, head_dim)

    return gather(K_PLANE), gather(V_PLANE)
