"""The cost model: monotone, bounded, outlier-proof, and right once it has seen enough."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckets.cost import BOUND, MAX_S, MIN_S, CostModel, CostOptions, Roofline, Work
from buckets.device_profile import DeviceProfile, ProfileTarget, ShapeProfile
from buckets.shape import StepShape

SMALL, LARGE, UNSEEN = (StepShape(n, 8, 4, 8) for n in (8, 64, 256))
BASES = {SMALL: 0.010, LARGE: 0.030}
KV_S, PAIR_S = 2e-7, 5e-9
TARGET = ProfileTarget("m", "c", "tensor=1", "v")

amounts = st.floats(0, 1e7)
works = st.builds(
    Work, amounts, amounts, st.dictionaries(st.sampled_from(["experts", "images"]), amounts)
)
steps = st.tuples(st.sampled_from([SMALL, LARGE]), works, st.floats(1e-5, 10))


def true_s(shape: StepShape, work: Work) -> float:
    return BASES[shape] + KV_S * work.kv_tokens_read + PAIR_S * work.attention_work


def draw(rng: np.random.Generator) -> tuple[StepShape, Work]:
    shape = SMALL if rng.random() < 0.5 else LARGE
    kv = float(rng.integers(8, 100_000))
    return shape, Work(kv, kv * shape.num_tokens * float(rng.random()))


def taught(seed: int, count: int, spoil: float = 0.0, noise: float = 0.03) -> CostModel:
    """A model after `count` steps of the true cost; a share of them is spoiled by pauses."""
    rng = np.random.default_rng(seed)
    model = CostModel()
    for _ in range(count):
        shape, work = draw(rng)
        seconds = true_s(shape, work) * rng.lognormal(0, noise)
        model.observe(shape, work, seconds * 30 if rng.random() < spoil else seconds)
    return model


def error(model: CostModel, seed: int = 99) -> float:
    rng = np.random.default_rng(seed)
    pairs = [draw(rng) for _ in range(200)]
    return float(np.median([abs(model.predict(*p) / true_s(*p) - 1) for p in pairs]))


@settings(deadline=None, max_examples=40)
@given(seen=st.lists(steps, max_size=40), shape=st.sampled_from([SMALL, LARGE, UNSEEN]), work=works)
def test_predictions_are_bounded_whatever_was_seen(
    seen: list[tuple[StepShape, Work, float]], shape: StepShape, work: Work
):
    model = CostModel()
    for step in seen:
        model.observe(*step)
    assert MIN_S <= model.predict(shape, work) <= MAX_S
    times = [s for other, _, s in seen if other == shape][1:]
    if model.source(shape) == "observed":
        assert model.predict(shape, work) >= min(times) / BOUND


@settings(deadline=None, max_examples=40)
@given(
    seen=st.lists(steps, max_size=40),
    shape=st.sampled_from([SMALL, LARGE, UNSEEN]),
    work=works,
    more=st.tuples(amounts, amounts, amounts),
)
def test_more_work_never_costs_less(
    seen: list[tuple[StepShape, Work, float]],
    shape: StepShape,
    work: Work,
    more: tuple[float, float, float],
):
    model = CostModel()
    for step in seen:
        model.observe(*step)
    features = {**work.features, "experts": work.features.get("experts", 0.0) + more[2]}
    larger = Work(work.kv_tokens_read + more[0], work.attention_work + more[1], features)
    assert model.predict(shape, larger) >= model.predict(shape, work)


def test_it_converges_and_says_that_it_can_be_trusted():
    model = taught(1, 200)
    assert error(model) < 0.05
    assert model.is_trusted
    assert model.recent_error is not None
    assert model.recent_error < 0.10
    assert model.source(SMALL) == "observed"


def test_pauses_and_first_runs_do_not_spoil_it():
    assert error(taught(2, 200, spoil=0.1)) < 0.08
    model = CostModel()
    model.observe(SMALL, Work(10), 60.0)  # the first run compiles, pages in, warms up
    for _ in range(5):
        model.observe(SMALL, Work(10), 0.01)
    assert model.predict(SMALL, Work(10)) == pytest.approx(0.01)


def test_it_follows_a_device_that_changes():
    model = taught(3, 200)
    rng = np.random.default_rng(4)
    for _ in range(200):
        shape, work = draw(rng)
        model.observe(shape, work, 2 * true_s(shape, work))
    assert model.predict(SMALL, Work()) == pytest.approx(2 * BASES[SMALL], rel=0.1)


def test_a_slow_host_slows_all_shapes_within_a_few_steps():
    model = taught(8, 200)
    before = model.predict(LARGE, Work(100))
    for _ in range(6):
        model.observe(SMALL, Work(100), 3 * true_s(SMALL, Work(100)))
    assert model.predict(LARGE, Work(100)) == pytest.approx(3 * before, rel=0.15)


def test_it_is_not_trusted_where_steps_are_noise():
    rng = np.random.default_rng(5)
    model = CostModel()
    assert not model.is_trusted
    for _ in range(100):
        model.observe(SMALL, Work(100), float(rng.lognormal(-4, 2)))
    assert not model.is_trusted


def test_a_named_feature_gets_its_own_slope():
    rng = np.random.default_rng(6)
    model = CostModel()
    for _ in range(100):
        images = float(rng.integers(0, 10))
        model.observe(SMALL, Work(100, 100, {"images": images}), 0.01 + 0.002 * images)
    assert model.predict(SMALL, Work(100, 100, {"images": 8.0})) == pytest.approx(0.026, rel=0.05)
    assert model.predict(SMALL, Work(100, 100, {"other": 8.0})) == pytest.approx(0.010, rel=0.05)


def test_estimates_come_before_the_roofline_and_observations_before_both():
    profile = DeviceProfile(
        TARGET,
        {
            SMALL: ShapeProfile(estimated_step_s=0.02),
            LARGE: ShapeProfile(estimated_step_s=0.5, measured_step_s=0.05),
        },
    )
    model = CostModel(profile=profile)
    assert model.source(SMALL) == "estimate"
    assert model.predict(SMALL, Work()) == pytest.approx(0.02)
    assert model.predict(LARGE, Work()) == pytest.approx(0.05)
    assert model.predict(SMALL, Work(10_000_000)) > 0.02
    assert model.source(UNSEEN) == "roofline"
    for _ in range(5):
        model.observe(LARGE, Work(), 0.2)
    assert model.source(LARGE) == "observed"
    # What was seen of one shape corrects the estimate of another: this device is 4 times slower.
    assert model.predict(SMALL, Work()) == pytest.approx(0.08)


def test_the_roofline_is_the_nearer_of_its_two_roofs():
    roofline = Roofline(
        bytes_per_s=1e12,
        flops_per_s=1e14,
        weight_bytes=1e10,
        flops_per_token=1e10,
        kv_token_bytes=1e5,
        fixed_s=0.0,
    )
    assert roofline.seconds(SMALL, Work()) == pytest.approx(0.01)
    assert roofline.seconds(UNSEEN, Work()) == pytest.approx(256e10 / 1e14)
    assert roofline.seconds(SMALL, Work(1e6)) == pytest.approx(0.11)


def test_nonsense_is_left_out_or_refused():
    model = taught(7, 50)
    before = model.predict(SMALL, Work(100))
    for bad in (0.0, -1.0, float("nan"), float("inf"), 1e9):
        model.observe(SMALL, Work(100), bad)
    assert model.predict(SMALL, Work(100)) == before
    for amount, name in itertools.product((-1.0, float("nan")), ("kv_tokens_read", "experts")):
        with pytest.raises(ValueError, match=name):
            Work(amount) if name == "kv_tokens_read" else Work(features={name: amount})


def test_few_observations_are_not_believed():
    model = CostModel(options=CostOptions(min_observations=3, skip=1))
    for _ in range(3):
        model.observe(SMALL, Work(), 0.5)
    assert model.source(SMALL) == "roofline"
    model.observe(SMALL, Work(), 0.5)
    assert model.source(SMALL) == "observed"
