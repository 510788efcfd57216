"""The cases have teeth: each small fault put into the source makes some case fail.

A mutant is a module compiled from its source with one expression replaced. Most run with
`make test-long`, a few always.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention import api, cache_layout, dispatch, quantize, ragged, reference, xla
from tests.attention_cases import assert_correct, make_case

ROWS = [(5, 1), (0, 7), (64, 1), (31, 33), (128, 1), (126, 4)]
PLAIN: dict[str, Any] = dict(heads=(6, 2, 16), seed=1)
WINDOW = PLAIN | dict(window=17)
SINKS = PLAIN | dict(sinks=True)
TREE = PLAIN | dict(tree=True, decode_queries=4)
CAP = PLAIN | dict(soft_cap=2.0)
INT8 = PLAIN | dict(kv_dtype="int8", scales=(0.04, 2.0))
FLOAT8 = PLAIN | dict(kv_dtype="float8_e4m3fn", scales=(25.0, 2.0))


@dataclass(frozen=True)
class Mutant:
    module: ModuleType
    right: str
    wrong: str
    case: Mapping[str, Any]
    backend: str = "xla"


QUICK = {
    "reference keeps NaN values": Mutant(
        reference,
        "jnp.where(visible[:, None, :, None], values.astype(jnp.float32), 0.0)",
        "values.astype(jnp.float32)",
        PLAIN,
        "reference",
    ),
    "reference window off by one": Mutant(
        reference,
        "positions > own - data.window",
        "positions >= own - data.window",
        WINDOW,
        "reference",
    ),
    "reference forgets sinks": Mutant(reference, " + jnp.exp(sink - top)", "", SINKS, "reference"),
    "scale of keys forgotten": Mutant(api, "scale_heads(q, k_scale)", "q", INT8, "reference"),
    "scale of another head": Mutant(
        quantize,
        "jnp.repeat(scale, x.shape[1] // scale.shape[0])",
        "jnp.tile(scale, x.shape[1] // scale.shape[0])",
        INT8,
        "reference",
    ),
    "padding tokens overwrite a page": Mutant(
        ragged,
        "jnp.where(is_token, page_table[seqs, positions // page_size], NULL_PAGE)",
        "page_table[seqs, positions // page_size]",
        PLAIN,
        "reference",
    ),
}
LONG = {
    "values unmasked": Mutant(
        xla, "jnp.where(used[:, None, :, None], values, 0.0)", "values", PLAIN
    ),
    "values left of a window unmasked": Mutant(
        xla, "used &= jnp.any(visible, axis=1)", "pass", WINDOW
    ),
    "a query doesn't see itself": Mutant(
        xla, "visible = place <= own", "visible = place < own", PLAIN
    ),
    "window off by one": Mutant(xla, "(place > own - window)", "(place >= own - window)", WINDOW),
    "window starts a page late": Mutant(
        xla,
        "jnp.maximum(first, 0) // page_size,",
        "jnp.maximum(first, 0) // page_size + 1,",
        WINDOW,
    ),
    "sum not rescaled": Mutant(xla, "acc * keep[..., None] +", "acc +", PLAIN),
    "denominator of the next row": Mutant(
        xla, "denominator * keep", "jnp.roll(denominator, 1, -1) * keep", PLAIN
    ),
    "maximum of the next row": Mutant(
        xla,
        "return new_top, denominator, acc",
        "return jnp.roll(new_top, 1, -1), denominator, acc",
        PLAIN,
    ),
    "last page skipped": Mutant(xla, "page_size + 1 - first_page", "page_size - first_page", PLAIN),
    "sink has no share": Mutant(
        xla, "denominator = jnp.exp(sinks - top)", "denominator = jnp.zeros_like(top)", SINKS
    ),
    "sink of another head": Mutant(
        xla,
        "jnp.tile(layer.data.sinks.reshape(num_kv_heads, -1), (1, num_queries))",
        "jnp.repeat(layer.data.sinks.reshape(num_kv_heads, -1), num_queries, axis=1)",
        SINKS,
    ),
    "cap forgotten": Mutant(
        xla, "layer.scoring.soft_cap * jnp.tanh(scores / layer.scoring.soft_cap)", "scores", CAP
    ),
    "factor forgotten": Mutant(
        xla, "q.astype(jnp.float32) * scoring.scale", "q.astype(jnp.float32)", PLAIN
    ),
    "pages of another row": Mutant(
        xla,
        "work.page_table[members(blocks.seqs)]",
        "work.page_table[members(blocks.seqs) - 1]",
        PLAIN,
    ),
    "tree ignored": Mutant(ragged, "(named == 1)", "(named >= 0)", TREE),
    "tree of a long row": Mutant(
        ragged, "places.q_lens <= decode_queries", "places.q_lens > 0", TREE
    ),
    "positions off by one": Mutant(
        ragged, "firsts + token - cu_q_lens[seqs]", "firsts + token - cu_q_lens[seqs] - 1", PLAIN
    ),
    "layer ignored": Mutant(
        cache_layout,
        "cache.at[layer, pages[:, None, :]",
        "cache.at[1 - layer, pages[:, None, :]",
        PLAIN,
    ),
    "values taken for keys": Mutant(cache_layout, "gather(K_PLANE)", "gather(V_PLANE)", PLAIN),
    "new tokens not written": Mutant(
        xla,
        "cache = write_kv(cache, data.layer, k_new, v_new, work.places.pages, work.places.slots)",
        "pass",
        PLAIN,
    ),
    "rounds down": Mutant(quantize, "jnp.round(wide)", "jnp.floor(wide)", INT8),
    "stores -128": Mutant(
        quantize,
        "jnp.clip(jnp.round(wide), -INT8_LIMIT, INT8_LIMIT)",
        "jnp.clip(jnp.round(wide), -128, 127)",
        INT8,
    ),
    "overflows to NaN": Mutant(quantize, "jnp.clip(wide, -limit, limit)", "wide", FLOAT8),
    "scale not applied on write": Mutant(quantize, "wide = wide / scale[:, None]", "pass", FLOAT8),
    "scale of values forgotten": Mutant(
        api,
        "scale_heads(unpack_output(layout, out), v_scale)",
        "unpack_output(layout, out)",
        FLOAT8,
    ),
}


def install(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the module's functions wherever `kernels.attention` imported them."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.right) == 1, mutant.right
    fresh = ModuleType(mutant.module.__name__)
    path = inspect.getsourcefile(mutant.module) or "mutant"
    exec(compile(source.replace(mutant.right, mutant.wrong), path, "exec"), fresh.__dict__)
    owners = [m for name, m in sys.modules.items() if name.startswith("kernels.attention")]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType) and value.__module__ == fresh.__name__:
                monkeypatch.setattr(owner, name, vars(fresh)[value.__name__])


def run_and_compare(case_spec: Mapping[str, Any], backend: str) -> None:
    # Padding tokens without a padding row: nothing but their own mask keeps them from real pages.
    case = make_case(ROWS, num_rows=len(ROWS), **case_spec)
    options = case.static_options() | dict(backend=backend)
    op = jax.jit(lambda *a, **data: api.ragged_paged_attention(*a, **data, **options))
    out, cache = op(*case.arguments(), **case.options())
    assert_correct(case, np.asarray(out), np.asarray(cache))


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = QUICK[name]
    run_and_compare(mutant.case, mutant.backend)
    install(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        run_and_compare(mutant.case, mutant.backend)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_a_fault_of_the_xla_path_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(LONG[name], monkeypatch)
    with pytest.raises(AssertionError):
        run_and_compare(LONG[name].case, LONG[name].backend)


@pytest.mark.long
@pytest.mark.parametrize("case", [PLAIN, WINDOW, SINKS, TREE, CAP, INT8, FLOAT8], ids=str)
def test_without_a_fault_every_case_passes(case: Mapping[str, Any]) -> None:
    run_and_compare(case, "xla")


def test_mutants_touch_what_the_op_runs() -> None:
    assert dispatch.xla_attention is xla.xla_attention
