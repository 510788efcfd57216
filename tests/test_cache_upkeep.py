"""Why a program isn't found, and which ones go: both are pure decisions."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.cache_key import CacheKey
from buckets.cache_upkeep import Usage, choose_removals, explain

KEY = CacheKey(
    program="3f" * 32,
    shape="tokens=16 seqs=1 pages=4 logits=1 full",
    devices="TPU v6 lite x 8, 2x4x1",
    mesh="tensor=8",
    compiler_options='{"xla_a": true, "xla_b": 2}',
    versions="jax 0.10.2, jaxlib 0.10.2, libtpu 0.0.42",
    flags="XLA_FLAGS=--xla_one --xla_two=3\njax_enable_x64=False",
    host="flags: sse avx avx2; model name",
)


@pytest.mark.parametrize(
    ("component", "value", "change"),
    [
        ("program", "99" * 32, "999999999999 -> 3f3f3f3f3f3f (the model, an option"),
        ("devices", "TPU v5 lite x 4, 2x2x1", "TPU v5 lite x 4, 2x2x1 -> TPU v6 lite x 8, 2x4x1"),
        ("mesh", "tensor=4", "tensor=4 -> tensor=8"),
        ("compiler_options", '{"xla_a": true}', "(nothing) -> xla_b=2"),
        ("versions", "jax 0.10.2, jaxlib 0.10.2, libtpu 0.0.41", "libtpu 0.0.41 -> libtpu 0.0.42"),
        (
            "flags",
            "XLA_FLAGS=--xla_two=3\njax_enable_x64=False",
            "(nothing) -> XLA_FLAGS=--xla_one",
        ),
        ("host", "flags: sse avx avx512f; model name", "avx512f -> avx2"),
        ("built_on", "TPU v6 lite, runtime 7", "TPU v6 lite, runtime 7 -> (nothing)"),
    ],
)
def test_the_component_that_differs_is_named_and_only_what_differs_in_it(
    component: str, value: str, change: str
) -> None:
    stored = replace(KEY, **{component: value})
    found = explain(KEY, [stored])
    assert not found.is_stored
    assert found.nearest == stored.digest()
    (difference,) = found.differences
    assert difference.component == component
    assert difference.change.startswith(change)


def test_every_component_but_the_shape_is_in_that_table() -> None:
    # A component that comes later must get a readable difference too.
    table = test_the_component_that_differs_is_named_and_only_what_differs_in_it.pytestmark[0].args[
        1
    ]
    assert {row[0] for row in table} | {"shape"} == {field.name for field in fields(CacheKey)}


def test_a_stored_key_is_found_among_others() -> None:
    found = explain(KEY, [replace(KEY, mesh="tensor=4"), KEY])
    assert found.is_stored
    assert found.differences == ()


def test_the_nearest_entry_of_the_shape_is_compared() -> None:
    far = replace(KEY, mesh="tensor=4", devices="TPU v4 x 4, 2x2x1")
    near = replace(KEY, versions="jax 0.12.0")
    other_shape = replace(KEY, shape="tokens=32 seqs=1 pages=4 logits=1 full")
    found = explain(KEY, [far, near, other_shape])
    assert [one.component for one in found.differences] == ["versions"]


def test_a_shape_that_was_never_stored_has_no_nearest() -> None:
    assert explain(KEY, [replace(KEY, shape="another")]).nearest is None


usages = st.dictionaries(
    st.text("0123456789abcdef", min_size=4, max_size=4),
    st.builds(
        Usage, st.sampled_from(["a", "b", "c"]), st.integers(0, 100), st.integers(0, 50).map(float)
    ),
    max_size=12,
)


@given(usages, st.sets(st.sampled_from(["a", "b"])), st.integers(0, 500), st.integers(0, 60))
def test_what_is_removed_is_old_enough_and_no_more_than_needed(
    entries: dict[str, Usage], kept: set[str], max_bytes: int, since: int
) -> None:
    chosen = choose_removals(
        entries, kept_shapes=kept, unused_since_s=float(since), max_bytes=max_bytes
    )
    removable = {d for d, usage in entries.items() if usage.shape not in kept}
    too_old = {d for d in removable if entries[d].last_use_s < since}
    assert too_old <= chosen <= removable
    left = sum(usage.num_bytes for d, usage in entries.items() if d not in chosen)
    assert left <= max_bytes or chosen == removable
    for_size = chosen - too_old
    if for_size:
        newest = max(for_size, key=lambda d: (entries[d].last_use_s, d))
        assert left + entries[newest].num_bytes > max_bytes
        assert all(
            (entries[d].last_use_s, d) > (entries[newest].last_use_s, newest)
            for d in removable - chosen
        )


def test_without_limits_nothing_goes() -> None:
    assert choose_removals({"d": Usage("a", 10, 0.0)}) == set()
