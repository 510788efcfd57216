"""Amounts and rooflines the engine tells the cost model, and what the step loop does with it."""

from __future__ import annotations

import itertools

import pytest

from buckets.cost import Work
from buckets.shape import StepShape
from kernels.chips import chip_named
from tests.fake_engine import FakeEngine, request
from tpu_engine.messages import Submit
from tpu_engine.models.config import ModelConfig
from tpu_engine.step_cost import roofline_of

LLAMA_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    max_model_len=131072,
)


def test_work_counts_what_every_token_sees():
    engine = FakeEngine(seqs=4, tokens=8)
    engine.run([request(1, num_prompt=20, max_tokens=3), request(2, num_prompt=3, max_tokens=4)])
    for plan in engine.runner.plans:
        seen = [start + i + 1 for _, _, start, n in plan.rows() for i in range(n)]
        work = plan.work
        assert work.attention_work == sum(seen)
        assert work.kv_tokens_read == sum(start + n for _, _, start, n in plan.rows())


@pytest.mark.parametrize("shards", [1, 8])
def test_the_roofline_of_llama_8b_has_the_known_figures(shards: int):
    roofline = roofline_of(
        LLAMA_8B, chip_named("v6e"), shards, 16 * 10**9 // shards, 131072 / shards
    )
    layers, head = roofline.flops_per_token * shards, roofline.flops_per_logit_row * shards
    assert layers / 2 == pytest.approx(6.98e9, rel=0.01)  # 8.03e9 less two tables of 0.525e9
    assert head / 2 == pytest.approx(0.525e9, rel=0.01)
    assert roofline.flops_per_pair * shards == 4 * 32 * 128 * 32
    decode_s = roofline.seconds(StepShape(8, 8, 256, 8), first_work())
    assert decode_s == pytest.approx(16e9 / shards / 1.64e12, rel=0.05)


def first_work() -> Work:
    """The work of a prompt of one token."""
    engine = FakeEngine()
    engine.turn([Submit(request(1, num_prompt=1))])
    return engine.runner.plans[0].work


def test_chips_of_two_cores_have_both():
    one, two = (roofline_of(LLAMA_8B, chip_named(n), 1, 1, 1.0) for n in ("v6e", "v5p"))
    assert one.bytes_per_s == chip_named("v6e").hbm_bytes_per_s
    assert two.flops_per_s == 2 * chip_named("v5p").bf16_flops
    assert one.is_exact
    assert not roofline_of(LLAMA_8B, None, 1, 1, 1.0).is_exact


@pytest.mark.parametrize("overlap", [True, False])
def test_the_loop_predicts_before_and_learns_after_each_step(overlap: bool):
    """A runner whose steps take 20 ms per read: the loop's own clock shows them."""
    engine = FakeEngine(seqs=2, tokens=8, overlap=overlap)
    ticks = itertools.count()
    engine.loop.turn([Submit(request(1, num_prompt=4, max_tokens=60))], 0.0)
    while engine.loop.has_work:
        engine.loop.turn([], lambda: 0.02 * next(ticks))
    records = list(engine.loop.records)
    assert all(r.predicted_s > 0 for r in records)
    assert sum(r.added_s for r in records) <= records[-1].collected_s
    late = records[40:-1]
    assert all(r.predicted_s == pytest.approx(r.added_s, rel=0.05) for r in late)
    assert engine.loop.cost.is_trusted


def test_a_failed_step_teaches_nothing():
    engine = FakeEngine()
    engine.runner.fail_steps = set(range(1, 50))
    engine.run([request(i) for i in range(1, 6)])
    assert engine.loop.records
    assert engine.loop.cost.recent_error is None
