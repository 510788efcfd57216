"""Copies of whole KV pages, all layers at once: what offload, transfer and prefix copies move.

Owns gather and scatter of pages between the paged cache and a contiguous block, each with its
plain-JAX definition. On a TPU a page is one strided transfer from HBM to HBM; XLA's own gather
walks page by page through VMEM (docs/kernels.md has the figures). Knows no page's owner: unused
entries of `pages` name the null page, whose contents mean nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

Backend = Literal["xla", "pallas", "pallas-interpret"]
BACKENDS: tuple[str, ...] = ("xla", "pallas", "pallas-interpret")


def gather_pages(
    cache: Shaped[Array, "L P ..."], pages: Int[Array, "n"], *, backend: Backend = "xla"
) -> Shaped[Array, "L n ..."]:
    """Returns pages `pages` of every layer, in that order; each must be within `0 .. P - 1`.

    Raises ValueError for `pages` that are not int32 `[n]`, or an unknown backend.
    """
    _check(cache, pages, backend)
    if backend == "xla":
        return cache.at[:, pages].get(mode="promise_in_bounds")
    out = jax.ShapeDtypeStruct((cache.shape[0], pages.shape[0], *cache.shape[2:]), cache.dtype)
    return _copy(backend, out, pages, (cache,), to_cache=False)


def scatter_pages(
    cache: Shaped[Array, "L P ..."],
    pages: Int[Array, "n"],
    block: Shaped[Array, "L n ..."],
    *,
    backend: Backend = "xla",
) -> Shaped[Array, "L P ..."]:
    """Writes `block` into pages `pages` of every layer; donate `cache`, it is returned.

    Only the null page may be named twice. Raises ValueError as `gather_pages` does, and for a
    block of another shape or dtype.
    """
    _check(cache, pages, backend)
    expected = (cache.shape[0], pages.shape[0], *cache.shape[2:])
    if block.shape != expected or block.dtype != cache.dtype:
        raise ValueError(
            f"block must be {cache.dtype} {expected} to fit the cache, "
            f"got {block.dtype} {block.shape}"
        )
    if backend == "xla":
        return cache.at[:, pages].set(block, mode="promise_in_bounds")
    out = jax.ShapeDtypeStruct(cache.shape, cache.dtype)
    return _copy(backend, out, pages, (block, cache), to_cache=True)


def _check(cache: Array, pages: Array, backend: str) -> None:
    if cache.ndim < 4:
        raise ValueError(f"cache must be [L, P, ...] with a page's own axes, got {cache.shape}")
    if pages.ndim != 1 or pages.dtype != jnp.int32 or not pages.size:
        raise ValueError(f"pages must be int32 [n] and not empty, got {pages.dtype} {pages.shape}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _copy(
    backend: str,
    out: jax.ShapeDtypeStruct,
    pages: Int[Array, "n"],
    arrays: tuple[Array, ...],
    *,
    to_cache: bool,
) -> Array:
    """One call; the arrays stay in HBM, the last of two is the cache that the output aliases."""
    moved = arrays[0].size if to_cache else out.size
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_copy_pages, to_cache=to_cache),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[in_hbm] * len(arrays),
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={2: 0} if to_cache else {},  # counts the prefetched page numbers
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * moved * out.dtype.itemsize
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if backend != "pallas" else False,
        name="scatter_pages" if to_cache else "gather_pages",
    )(pages, *arrays)


def _copy_pages(pages_ref, source_ref, *refs, to_cache: bool) -> None:
    """Starts every page's transfer, then waits for all: they are independent of each other."""
    target_ref, done = refs[-2], refs[-1]

    def transfer(i: Int[Array, ""]):
        page = pages_ref[i]
        source = source_ref.at[:, i if to_cache else page]
        return pltpu.make_async_copy(source, target_ref.at[:, page if to_cache else i], done)

    @pl.loop(0, pages_ref.shape[0])
    def _start(i: Int[Array, ""]) -> None:
        transfer(i).start()

    @pl.loop(0, pages_ref.shape[0])
    def _wait(i: Int[Array, ""]) -> None:
        transfer(i).wait()
