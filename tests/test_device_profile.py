"""The device profile: facts that are known, facts that are not, and what a file may say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckets.device_profile import (
    DeviceProfile,
    ProfileTarget,
    ShapeProfile,
    profile_from_yaml,
    profile_to_yaml,
)
from buckets.plan import InvalidPlan, Plan
from buckets.plan_file import PlanFile, plan_file_from_yaml, plan_to_yaml, with_profile
from buckets.shape import StepShape

TARGET = ProfileTarget("llama", "v6e", "tensor=8", "jax 0.10.2")
SMALL, LARGE = StepShape(8, 8, 4, 8), StepShape(64, 8, 4, 8)
PROFILE = DeviceProfile(
    TARGET, {SMALL: ShapeProfile(compile_s=2.5, hbm_bytes=1 << 34), LARGE: ShapeProfile()}
)

amounts = st.none() | st.floats(0, 1e18)
counts = st.none() | st.integers(0, 2**50)
facts = st.builds(
    ShapeProfile,
    compile_s=amounts,
    hbm_bytes=counts,
    estimated_step_s=amounts,
    measured_step_s=amounts,
    num_measured=counts,
)


@settings(deadline=None)
@given(first=facts, second=facts)
def test_files_keep_every_fact(first: ShapeProfile, second: ShapeProfile):
    profile = DeviceProfile(TARGET, {SMALL: first, LARGE: second})
    assert profile_from_yaml(profile_to_yaml(profile)) == profile
    assert profile_from_yaml(json.dumps(profile.to_json())) == profile


def test_a_shape_nobody_looked_at_has_no_facts():
    assert PROFILE.of(StepShape(1, 1, 4, 1)) == ShapeProfile()
    assert PROFILE.of(SMALL).known() == {"compile_s": 2.5, "hbm_bytes": 1 << 34}


def test_newer_facts_join_older_ones():
    newer = DeviceProfile(TARGET, {SMALL: ShapeProfile(compile_s=3.0, measured_step_s=0.01)})
    joined = PROFILE.updated(newer)
    assert joined.of(SMALL) == ShapeProfile(compile_s=3.0, hbm_bytes=1 << 34, measured_step_s=0.01)
    assert LARGE in joined.shapes


def test_facts_of_another_target_are_not_mixed():
    other = DeviceProfile(replace(TARGET, chip="v5e"), {LARGE: ShapeProfile(compile_s=1.0)})
    assert PROFILE.updated(other) == other


def test_a_plan_file_holds_the_profile():
    plan = Plan.of([SMALL, LARGE])
    content = plan_file_from_yaml(plan_to_yaml(plan, PROFILE))
    assert content.plan == plan
    assert content.profile == PROFILE
    assert plan_file_from_yaml(plan_to_yaml(plan)).profile is None


ROW = "num_tokens: 8, num_seqs: 8, pages_per_seq: 4, num_logit_rows: 8"
HEAD = "schema_version: 1\nmodel: m\nchip: c\nmesh: x\nversions: v\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD.replace("1", "2", 1), "schema_version of a device profile must be 1 .*got 2"),
        (HEAD.replace("chip: c\n", ""), "chip must be text, got None"),
        (f"{HEAD}shapes: [{{{ROW}, compile_ms: 1}}]", "'compile_ms'; nearest known: compile_s"),
        (f"{HEAD}shapes: [{{{ROW}, compile_s: -1}}]", r"shapes\[0\].*compile_s must be .* least 0"),
        (f"{HEAD}shapes: [{{{ROW}, compile_s: .nan}}]", "compile_s must be finite"),
        (f"{HEAD}shapes: [{{{ROW}, compile_s: true}}]", "compile_s must be a number"),
        (f"{HEAD}shapes: [{{{ROW}, hbm_bytes: 1.5}}]", "hbm_bytes must be a whole number"),
        (f"{HEAD}shapes: [{{{ROW}}}, {{{ROW}}}]", r"shapes\[1\] of a device profile repeats"),
        (f"{HEAD}1: 2", "keys must be text"),
    ],
)
def test_refusals_name_the_key(text: str, message: str):
    with pytest.raises(InvalidPlan, match=message):
        profile_from_yaml(text)


def test_a_profile_joins_a_plan_file_that_a_person_edited():
    plan = Plan.of([SMALL, LARGE])
    text = "# mine\n" + plan_to_yaml(plan, PROFILE)
    newer = DeviceProfile(TARGET, {SMALL: ShapeProfile(compile_s=3.0)})
    written = with_profile(text, newer)
    assert written.startswith("# mine\n")
    assert plan_file_from_yaml(written) == PlanFile(plan, PROFILE.updated(newer))
    assert with_profile(written, newer) == written
    assert with_profile(text.replace("device_profile:", "# after\ndevice_profile:"), newer)


def test_a_plan_file_of_the_first_version_is_rewritten_with_its_profile():
    plan = Plan.of([SMALL])
    first = (
        "schema_version: 1\nshapes:\n"
        "- {num_tokens: 8, num_seqs: 8, pages_per_seq: 4, num_logit_rows: 8}\n"
    )
    assert plan_file_from_yaml(with_profile(first, PROFILE)) == PlanFile(plan, PROFILE)
