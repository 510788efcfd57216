"""Where a token's K and V lie: rows of heads in registers, their bytes, and the op over each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention import ragged_paged_attention
from kernels.attention.cache_layout import KvLayout, kv_layout
from tests.attention_cases import PLAIN_BACKENDS, Case, assert_correct, make_case

STATIC = ("scale", "soft_cap", "decode_queries", "layout", "backend")
OP = jax.jit(ragged_paged_attention, static_argnames=STATIC)
ROWS = [(5, 1), (0, 7), (64, 1), (31, 33), (2, 2)]

# (K, H) -> planes, rows, lanes, value lanes; and bytes against K * H * 2 values per position.
PACKED = {
    (8, 128): ((2, 8, 128, 128), 1.0),
    (2, 256): ((2, 2, 256, 256), 1.0),
    (8, 64): ((2, 4, 128, 128), 1.0),
    (3, 64): ((1, 3, 128, 128), 1.0),
    (1, 64): ((1, 1, 128, 128), 1.0),
    (4, 32): ((2, 1, 128, 128), 1.0),
    (2, 32): ((1, 1, 128, 128), 1.0),
    (4, 80): ((2, 4, 128, 128), 1.6),
    (4, 96): ((2, 4, 128, 128), 4 / 3),
}


def layout_of(heads: tuple[int, int], **more: Any) -> KvLayout:
    given: dict[str, Any] = dict(page_size=16, dtype="float32", lanes=128) | more
    return kv_layout(num_kv_heads=heads[0], head_dim=heads[1], **given)


@pytest.mark.parametrize("heads", PACKED, ids=str)
def test_rows_and_bytes(heads: tuple[int, int]) -> None:
    (planes, rows, width, value_width), factor = PACKED[heads]
    layout = layout_of(heads)
    assert layout.shape(3, 7) == (3, 7, planes, rows, 16, width)
    assert layout.value_width == value_width
    values = 3 * 16 * 2 * heads[0] * heads[1]
    assert layout.page_bytes(3) == pytest.approx(values * factor * 4)


def test_without_packing_a_row_is_a_head() -> None:
    layout = layout_of((3, 80), lanes=1)
    assert layout.shape(2, 5) == (2, 5, 2, 3, 16, 80)
    assert layout.page_bytes(2) == 2 * 2 * 3 * 16 * 80 * 4


def laid_out(cache: np.ndarray, layout: KvLayout) -> np.ndarray:
    """The packed array of a `[L, P, 2, K, S, H]` one: zeros in spare lanes of owned slots."""
    num_layers, num_pages, _, num_heads, page_size, head_dim = cache.shape
    owned = ~np.isnan(cache[:, :, :1, :1, :, :1].astype(np.float32))
    shape = layout.shape(num_layers, num_pages)
    packed = np.where(owned, np.zeros(shape, cache.dtype), np.full(shape, np.nan, cache.dtype))
    assert packed.shape[4] == page_size
    side = layout.heads_per_row
    for plane in range(2):
        for head in range(num_heads):
            lane = head % side * head_dim
            if layout.planes == 1 and plane == 0:  # keys follow the values of all heads in the row
                lane += side * head_dim
            target = packed[:, :, plane if layout.planes == 2 else 0, head // side]
            target[..., lane : lane + head_dim] = cache[:, :, plane, head]
    return packed.astype(cache.dtype)


def assert_matches(case: Case, layout: KvLayout, backend: str) -> None:
    packed = laid_out(case.cache, layout)
    arguments = (*case.arguments()[:3], packed, *case.arguments()[4:])
    options = case.options() | case.static_options() | dict(layout=layout)
    out, cache = OP(*arguments, **options, backend=backend)
    expected = assert_correct(case, np.asarray(out), None)
    np.testing.assert_array_equal(
        np.asarray(cache)[:, 1:].astype(np.float32),
        laid_out(expected.cache, layout)[:, 1:].astype(np.float32),
    )


@pytest.mark.parametrize("heads", [h for h in PACKED if h[1] < 128], ids=str)
def test_reference_over_packed_heads(heads: tuple[int, int]) -> None:
    k, h = heads
    assert_matches(make_case(ROWS, heads=(3 * k, k, h)), layout_of(heads), "reference")


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
@pytest.mark.parametrize(
    "heads",
    [(3, 64), *(pytest.param(x, marks=pytest.mark.long) for x in ((4, 64), (1, 80)))],
    ids=str,
)
def test_scales_and_options_over_packed_heads(backend: str, heads: tuple[int, int]) -> None:
    k, h = heads
    kv: dict[str, Any] = dict(kv_dtype="float8_e4m3fn", scales=(0.04, 2.0), window=20, sinks=True)
    case = make_case(ROWS, heads=(2 * k, k, h), **kv)
    assert_matches(case, layout_of(heads, dtype="float8_e4m3fn"), backend)


def test_heads_that_are_split_over_devices_stay_whole_in_their_rows() -> None:
    assert layout_of((8, 64), num_shards=4).heads_per_row == 2
    alone = layout_of((8, 64), num_shards=8)
    assert (alone.planes, alone.heads_per_row) == (1, 1)
    part = alone.per_shard(8)
    assert part == layout_of((1, 64))
    assert part.shape(1, 2)[3] * 8 == alone.shape(1, 2)[3]
    with pytest.raises(ValueError, match="4 rows of KV heads"):
        layout_of((8, 64)).per_shard(8)
    with pytest.raises(ValueError, match="3 KV heads can't be split over 2 shards"):
        layout_of((3, 64), num_shards=2)


def test_geometry_of_a_packed_layer() -> None:
    geometry = layout_of((8, 64)).geometry(32, "bfloat16")
    assert (geometry.num_kv_heads, geometry.group, geometry.latent) == (4, 8, False)
    shared = layout_of((3, 64)).geometry(9, "float32")
    assert (shared.num_kv_heads, shared.group, shared.latent) == (3, 3, True)


@pytest.mark.parametrize(
    ("dtype", "too_small", "fits"),
    [("float32", 8, 16), ("bfloat16", 48, 64), ("int8", 16, 32), ("float8_e4m3fn", 96, 128)],
)
def test_kernels_refuse_pages_of_part_of_a_tile(dtype: str, too_small: int, fits: int) -> None:
    layout_of((8, 128), dtype=dtype, page_size=fits).geometry(32, "bfloat16")
    with pytest.raises(ValueError, match=rf"page_size must be a power of two .*{dtype}"):
        layout_of((8, 128), dtype=dtype, page_size=too_small).geometry(32, "bfloat16")


def test_kernels_refuse_queries_that_no_kernel_computes_with() -> None:
    with pytest.raises(ValueError, match=r"query heads \(5\) must be a multiple of KV heads \(2\)"):
        layout_of((2, 128)).geometry(5, "bfloat16")
    with pytest.raises(ValueError, match="queries must be bfloat16 or float32, got float16"):
        layout_of((2, 128)).geometry(4, "float16")


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "page_size", "num_shards"])
def test_refuses_sizes_below_one(name: str) -> None:
    given: dict[str, Any] = dict(num_kv_heads=2, head_dim=64, page_size=16, num_shards=1)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        kv_layout(**given | {name: 0}, dtype="float32", lanes=128)


def test_kernels_refuse_rows_of_part_of_a_register() -> None:
    with pytest.raises(ValueError, match="lanes=128"):
        layout_of((8, 64), lanes=1).geometry(32, "bfloat16")


def test_refuses_arrays_that_do_not_lie_as_the_layout_says() -> None:
    case = make_case(ROWS, heads=(4, 2, 64))
    for layout, message in (
        (layout_of((2, 64)), "cache must be"),
        (layout_of((2, 32)), "q has heads of 64, the layout of 32"),
        (layout_of((4, 64)), "k_new and v_new must be"),
        (layout_of((2, 64), lanes=1, dtype="bfloat16"), "its layout says bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            ragged_paged_attention(*case.arguments(), layout=layout)
