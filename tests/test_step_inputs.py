"""Packing a plan into the step's one input buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from buckets.shape import StepShape
from tpu_engine.errors import EngineError
from tpu_engine.step_inputs import InputLayout, pack
from tpu_engine.step_plan import SamplingColumns, StepPlan

SHAPE = StepShape(num_tokens=8, num_seqs=4, pages_per_seq=3, num_logit_rows=4)
MAX_SEQS = 16


def a_plan() -> StepPlan:
    """A decode (token on the device), a chunk that doesn't sample, a chunk that does."""
    return StepPlan(
        step_id=7,
        shape=SHAPE,
        request_ids=np.array([11, 12, 13], np.int64),
        epochs=np.zeros(3, np.int32),
        slots=np.array([5, 2, 9], np.int32),
        starts=np.array([20, 16, 0], np.int32),
        num_tokens=np.array([1, 4, 2], np.int32),
        samples=np.array([True, False, True]),
        last_on_device=np.array([True, False, False]),
        token_ids=np.array([0, 101, 102, 103, 104, 201, 202], np.int32),
        page_table=np.array([[3, 4, 0], [1, 2, 0], [6, 0, 0]], np.int32),
        sampling=SamplingColumns(
            temperature=np.array([0, 1, 0.5], np.float32),
            top_k=np.array([0, 3, 40], np.int32),
            top_p=np.array([1, 1, 0.9], np.float32),
            min_p=np.array([0, 0, 0.05], np.float32),
            seed=np.array([1, 2, 2**32 - 1], np.uint32),
        ),
    )


def fields(plan: StepPlan) -> dict[str, np.ndarray]:
    layout = InputLayout.of(plan.shape)
    buffer = pack(plan, layout, MAX_SEQS)
    return {name: layout.view(buffer, name) for name in layout.fields}


def test_packs_rows_and_leaves_padding_empty() -> None:
    field = fields(a_plan())
    assert field["token_ids"].tolist() == [0, 101, 102, 103, 104, 201, 202, 0]
    assert field["device_slots"].tolist() == [5, -1, -1, -1, -1, -1, -1, -1]
    assert field["cu_q_lens"].tolist() == [0, 1, 5, 7, 7]
    assert field["kv_lens"].tolist() == [21, 20, 2, 0]
    assert field["num_seqs"].tolist() == [3]
    assert field["page_table"].tolist() == [[3, 4, 0], [1, 2, 0], [6, 0, 0], [0, 0, 0]]


def test_packs_only_rows_that_sample() -> None:
    field = fields(a_plan())
    assert field["logit_rows"].tolist() == [0, 6, 0, 0]
    assert field["target_slots"].tolist() == [5, 9, MAX_SEQS, MAX_SEQS]
    assert field["position"].tolist() == [21, 2, 0, 0]
    assert field["top_k"].tolist() == [0, 40, 0, 0]
    assert field["seed"].view(np.uint32).tolist() == [1, 2**32 - 1, 0, 0]
    np.testing.assert_array_equal(
        field["temperature"].view(np.float32), np.array([0, 0.5, 0, 0], np.float32)
    )
    np.testing.assert_array_equal(
        field["top_p"].view(np.float32), np.array([1, 0.9, 1, 1], np.float32)
    )
    np.testing.assert_array_equal(
        field["min_p"].view(np.float32), np.array([0, 0.05, 0, 0], np.float32)
    )


def test_layout_has_no_gap_and_no_overlap() -> None:
    layout = InputLayout.of(SHAPE)
    end = 0
    for offset, dims in layout.fields.values():
        assert offset == end
        end += int(np.prod(dims))
    assert end == layout.size


@pytest.mark.parametrize(
    "smaller", [{"num_tokens": 6}, {"num_seqs": 2}, {"num_logit_rows": 1}, {"pages_per_seq": 2}]
)
def test_refuses_a_plan_larger_than_its_shape(smaller: dict[str, int]) -> None:
    plan = replace(a_plan(), shape=replace(SHAPE, **smaller))
    with pytest.raises(EngineError, match="exceeds its shape"):
        fields(plan)
