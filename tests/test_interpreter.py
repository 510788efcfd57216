"""A kernel that fails while interpreted doesn't spoil the judgement of the test behind it.

The two tests stand in this order on purpose: without the fixture `fresh_interpreter` the second one
would run under the settings that the first one left behind, where nobody looks for races.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def _fail(_: Any) -> None:
    raise RuntimeError("this kernel fails on purpose")


def _failing_kernel(source: Any, out: Any, copied: Any, done: Any) -> None:
    pltpu.make_async_copy(source, copied, done).start()
    jax.debug.callback(_fail, source.shape[0])
    out[...] = jnp.zeros_like(out)


def _racing_kernel(source: Any, out: Any, copied: Any, done: Any) -> None:
    copy = pltpu.make_async_copy(source, copied, done)
    copy.start()
    out[...] = copied[...]  # before the copy is there
    copy.wait()


def interpret(kernel: Any, *, detect_races: bool) -> jax.Array:
    shape = (8, 128)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=detect_races, uninitialized_memory="zero"),
    )
    return jax.block_until_ready(jax.jit(call)(jnp.ones(shape)))


def test_a_kernel_that_fails() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="fails on purpose"):
        interpret(_failing_kernel, detect_races=False)


def test_the_kernel_behind_it_is_judged_afresh(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        interpret(_racing_kernel, detect_races=True)
        noticed = capfd.readouterr().out  # older JAX only prints
    except jax.errors.JaxRuntimeError as error:
        noticed = str(error).upper()
    assert "RACE" in noticed
