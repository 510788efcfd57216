"""The layout of the paged KV cache: the one place that says where a token's K and V lie.

The cache of all layers of one KV group is a single array `[L, P, planes, R, S, width]`:

    L  layers                          planes  2: K, then V; 1: shared rows
    P  pages; page 0 is the null page  R       rows of heads (the axis tensor parallelism shards)
    S  token positions per page        width   lanes of a row

Position `p` of a sequence lies in slot `p % S` of page `page_table[seq, p // S]`. A page of one
layer is contiguous (one transfer moves it), and nothing is transposed between write and read.

Without lane packing (`lanes=1`) a row is one head: `[L, P, 2, K, S, H]`. TPU kernels read rows of
whole vector registers (`lanes=128`):

    H a multiple of 128        one head per row
    H below 128                as many heads side by side as fill 128 lanes; where their number does
                               not divide K, values and keys side by side in one plane: [V.. | K..]
    H that does not fit        padded to whole registers (H 80: 1.6 times the bytes, 96: 1.33)
    latent (MLA)               one plane, one row [latent | rope key | padding], 576 padded to 640

Slots nobody owns hold garbage, NaN included. Knows nothing of who owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.attention.geometry import QUERY_DTYPES, Geometry
from kernels.chips import LANES, SUBLANES

K_PLANE = 0
V_PLANE = 1
NULL_PAGE = 0
KV_HEAD_AXIS = 3
CACHE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where one layer's keys and values lie; made by `kv_layout` or `latent_layout`.

    Attributes:
        num_kv_heads: K, as the model counts them.
        head_dim: H, as the model counts it (latent: latent and rope lanes together).
        page_size: S.
        dtype: NumPy name of what is stored.
        heads_per_row: heads side by side in one row; divides K.
        planes: 2 for separate rows of K and V, 1 for shared rows.
        width: lanes of a row.
        value_width: lanes of a row that are read as values; with one plane the first ones.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    heads_per_row: int
    planes: int
    width: int
    value_width: int

    @property
    def num_rows(self) -> int:
        """R, rows of heads per position and plane."""
        return self.num_kv_heads // self.heads_per_row

    def shape(self, num_layers: int, num_pages: int) -> tuple[int, int, int, int, int, int]:
        """The shape of the cache array; `num_pages` includes the null page."""
        return (num_layers, num_pages, self.planes, self.num_rows, self.page_size, self.width)

    def page_bytes(self, num_layers: int) -> int:
        """Bytes of one page across all layers, padding included."""
        positions = num_layers * self.page_size
        return positions * self.planes * self.num_rows * self.width * jnp.dtype(self.dtype).itemsize

    def per_shard(self, num_shards: int) -> KvLayout:
        """The layout of one shard's part of the array; raises `ValueError` if rows don't divide."""
        if self.num_rows % num_shards:
            raise ValueError(
                f"{self.num_rows} rows of KV heads ({self.heads_per_row} heads each) "
                f"can't be split over {num_shards} shards"
            )
        return replace(self, num_kv_heads=self.num_kv_heads // num_shards)

    def geometry(self, num_q_heads: int, q_dtype: str) -> Geometry:
        """What a TPU kernel is compiled for; raises `ValueError` for rows no kernel can read."""
        if self.width % LANES or self.value_width % LANES:
            raise ValueError(
                f"TPU kernels read rows of whole registers ({LANES} lanes), got {self.width} key "
                f"and {self.value_width} value lanes: make the layout with lanes={LANES}"
            )
        if num_q_heads < 1 or num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"query heads ({num_q_heads}) must be a multiple of KV heads ({self.num_kv_heads})"
            )
        if q_dtype not in QUERY_DTYPES:
            raise ValueError(f"queries must be {' or '.join(QUERY_DTYPES)}, got {q_dtype}")
        # A DMA moves whole tiles; a register holds 8 rows of 32-bit words, so a tile of narrower
        # values has more rows. Two registers of float32 are one of bfloat16 queries.
        tile = max(2 * SUBLANES, SUBLANES * 4 // jnp.dtype(self.dtype).itemsize)
        if self.page_size < tile or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size must be a power of two of at least {tile} for a {self.dtype} cache on "
                f"TPUs (rows of one packed tile), got {self.page_size}"
            )
        return Geometry(
            num_q_heads=num_q_heads,
            num_kv_heads=self.num_rows,
            key_width=self.width,
            value_width=self.value_width,
            page_size=self.page_size,
            q_dtype=q_dtype,
            kv_dtype=self.dtype,
            latent=self.planes == 1,
        )


def kv_layout(
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    lanes: int = 1,
    num_shards: int = 1,
) -> KvLayout:
    """Chooses the rows with the fewest bytes; of equals, separate planes (less matrix work).

    `num_shards`: over how many devices the heads will be split; heads side by side stay together.
    """
    _check_sizes(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        lanes=lanes,
        num_shards=num_shards,
    )
    if num_kv_heads % num_shards:
        raise ValueError(f"{num_kv_heads} KV heads can't be split over {num_shards} shards")
    on_one_device = num_kv_heads // num_shards
    choices: list[KvLayout] = []
    for heads in range(1, max(lanes // head_dim, 1) + 1):
        side_by_side = heads * head_dim
        for planes in (2, 1):
            used = side_by_side if planes == 2 else 2 * side_by_side
            alone = heads == 1 and planes == 2
            if on_one_device % heads == 0 and (used <= lanes or alone):
                width, value_width = _whole(used, lanes), _whole(side_by_side, lanes)
                rows = (heads, planes, width, value_width)
                choices.append(KvLayout(num_kv_heads, head_dim, page_size, _known(dtype), *rows))
    return min(choices, key=lambda one: (one.page_bytes(1), -one.planes))


def latent_layout(
    *, latent_dim: int, rope_dim: int, page_size: int, dtype: str, lanes: int = 1
) -> KvLayout:
    """One shared row per position, `[latent | rope key | padding]`; values are the latent lanes."""
    _check_sizes(latent_dim=latent_dim, rope_dim=rope_dim, page_size=page_size, lanes=lanes)
    dim = latent_dim + rope_dim
    width, value_width = _whole(dim, lanes), _whole(latent_dim, lanes)
    return KvLayout(1, dim, page_size, _known(dtype), 1, 1, width, value_width)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _whole(size: int, lanes: int) -> int:
    return -(-size // lanes) * lanes


def _known(dtype: str) -> str:
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"a KV cache holds {', '.join(CACHE_DTYPES)}, got {dtype}")
    return dtype


def write_kv(
    cache: Array,
    layer: Int[Array, ""],
    keys: Array,
    values: Array | None,
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
) -> Array:
    """Writes one token's rows `[T, R, width]` per entry; padding tokens name the null page.

    `values` is None for shared rows.
    """
    planes = [keys] if values is None else [keys, values]
    rows = jnp.stack(planes, axis=1).astype(cache.dtype)  # [T, planes, R, width]
    cache = jnp.asarray(cache)  # outside of a jitted function it may be NumPy's
    return cache.at[layer, pages, :, :, slots].set(rows, mode="promise_in_bounds")


def read_kv_block(
    cache: Array, layer: Int[Array, ""], pages: Int[Array, "G W"], value_width: int
) -> tuple[Array, Array]:
    """Gathers a block of pages per group member: K and V of `W * S` positions, rows leading."""
    num_members, num_pages = pages.shape
    _, _, num_planes, num_rows, page_size, width = cache.shape
    rows = jnp.arange(num_rows)[None, :, None]

    def gather(plane: int) -> Array:
        block = cache.at[layer, pages[:, None, :], plane, rows].get(mode="promise_in_bounds")
        return block.reshape(num_members, num_rows, num_pages * page_size, width)

    keys = gather(K_PLANE)
    values = keys if num_planes == 1 else gather(V_PLANE)
    return keys, values[..., :value_width]
