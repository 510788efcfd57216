"""Heads in the lanes of a row: how a model's queries, keys and values fit the rows of a `KvLayout`.

Owns packing and its inverse, done by XLA around the kernels, so that no kernel knows a head
narrower than a register. Heads side by side share one row of keys; a query is zero in the lanes of
the other heads, so its scores are its own head's. Without lane packing this is the identity.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.attention.cache_layout import KvLayout


def pack_kv(
    layout: KvLayout, keys: Float[Array, "T K H"], values: Float[Array, "T K H"]
) -> tuple[Float[Array, "T R W"], Float[Array, "T R W"] | None]:
    """Rows of keys and of values; with one plane, rows `[V.. | K..]` and None."""
    side_by_side = (keys.shape[0], layout.num_rows, layout.heads_per_row * layout.head_dim)
    keys, values = keys.reshape(side_by_side), values.reshape(side_by_side)
    if layout.planes == 1:
        return pad_lanes(jnp.concatenate([values, keys], axis=-1), layout.width), None
    return pad_lanes(keys, layout.width), pad_lanes(values, layout.width)


def pack_queries(layout: KvLayout, q: Float[Array, "T N H"]) -> Float[Array, "T N W"]:
    """Each query in the lanes where its head's keys lie, zero elsewhere."""
    num_tokens, num_heads, head_dim = q.shape
    side = layout.heads_per_row
    if side > 1:
        # [T, rows, side, group, 1, H] selected into [T, rows, side, group, side, H]
        split = q.reshape(num_tokens, layout.num_rows, side, -1, 1, head_dim)
        own = jnp.eye(side, dtype=bool)[:, None, :, None]
        q = jnp.where(own, split, 0).reshape(num_tokens, num_heads, side * head_dim)
    before = side * head_dim if layout.planes == 1 else 0
    return jnp.pad(q, ((0, 0), (0, 0), (before, layout.width - before - q.shape[2])))


def unpack_output(layout: KvLayout, out: Float[Array, "T N W"]) -> Float[Array, "T N H"]:
    """The lanes of each query head's own values."""
    num_tokens, num_heads, _ = out.shape
    side, head_dim = layout.heads_per_row, layout.head_dim
    out = out[..., : side * head_dim]
    if side == 1:
        return out
    split = out.reshape(num_tokens, layout.num_rows, side, -1, side, head_dim)
    own = [split[:, :, i, :, i] for i in range(side)]
    return jnp.stack(own, axis=2).reshape(num_tokens, num_heads, head_dim)


def pad_lanes(rows: Float[Array, "T R X"], width: int) -> Float[Array, "T R W"]:
    """Appends zero lanes up to `width`."""
    return jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[2])))
