"""One step's inputs as one int32 buffer: packed on the host, cut apart inside the program.

Owns the layout of that buffer (one transfer per step instead of fifteen). `pack` is NumPy only,
so that batch building can be measured and simulated without a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from buckets.shape import StepShape
from tpu_engine.errors import EngineError
from tpu_engine.step_plan import Int32, StepPlan

FLOAT_FIELDS = frozenset({"temperature", "top_p", "min_p"})


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where each field lies in the buffer: name to (offset, shape)."""

    fields: Mapping[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def of(cls, shape: StepShape) -> InputLayout:
        """The layout of a step shape: `T` tokens, `B` rows, `W` pages, `R` sampled rows."""
        t, b, r = shape.num_tokens, shape.num_seqs, shape.num_logit_rows
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (t,),
            "device_slots": (t,),  # where to read the token on the device, -1: from token_ids
            "cu_q_lens": (b + 1,),
            "kv_lens": (b,),
            "page_table": (b, shape.pages_per_seq),
            "num_seqs": (1,),
            "logit_rows": (r,),  # the packed token whose logits the sampled row takes
            "target_slots": (r,),  # where its token goes; past the last slot: nowhere
            "position": (r,),
            "temperature": (r,),
            "top_k": (r,),
            "top_p": (r,),
            "min_p": (r,),
            "seed": (r,),
        }
        offset = 0
        fields: dict[str, tuple[int, tuple[int, ...]]] = {}
        for name, dims in shapes.items():
            fields[name] = (offset, dims)
            offset += int(np.prod(dims))
        return cls(MappingProxyType(fields), offset)

    def view(self, buffer: Int32, name: str) -> Int32:
        """The field `name` of `buffer`, without a copy."""
        offset, dims = self.fields[name]
        return buffer[offset : offset + int(np.prod(dims))].reshape(dims)


def pack(plan: StepPlan, layout: InputLayout, max_num_seqs: int) -> Int32:
    """Builds the buffer of a plan; padding rows and tokens are empty, sample nowhere.

    Raises `EngineError` when the plan doesn't fit its own shape: the scheduler is at fault.
    """
    shape = plan.shape
    sampled = np.flatnonzero(plan.samples)
    rows, tokens = plan.num_rows, plan.num_useful_tokens
    if (
        rows > shape.num_seqs
        or tokens > shape.num_tokens
        or len(sampled) > shape.num_logit_rows
        or plan.page_table.shape[1] > shape.pages_per_seq
    ):
        raise EngineError(
            f"step {plan.step_id} has {tokens} tokens, {rows} rows, {len(sampled)} sampled rows "
            f"and {plan.page_table.shape[1]} pages per row, which exceeds its shape ({shape})"
        )
    buffer = np.zeros(layout.size, np.int32)
    ends = np.cumsum(plan.num_tokens, dtype=np.int32)
    layout.view(buffer, "token_ids")[:tokens] = plan.token_ids
    device_slots = layout.view(buffer, "device_slots")
    device_slots[:] = -1
    from_device = np.flatnonzero(plan.last_on_device)
    device_slots[ends[from_device] - 1] = plan.slots[from_device]
    cu_q_lens = layout.view(buffer, "cu_q_lens")
    cu_q_lens[1 : rows + 1] = ends
    cu_q_lens[rows + 1 :] = tokens
    layout.view(buffer, "kv_lens")[:rows] = plan.starts + plan.num_tokens
    layout.view(buffer, "page_table")[:rows, : plan.page_table.shape[1]] = plan.page_table
    layout.view(buffer, "num_seqs")[:] = rows
    _pack_sampling(plan, layout, buffer, sampled, ends, max_num_seqs)
    return buffer


def _pack_sampling(
    plan: StepPlan,
    layout: InputLayout,
    buffer: Int32,
    sampled: np.ndarray,
    ends: Int32,
    max_num_seqs: int,
) -> None:
    count = len(sampled)
    columns = plan.sampling
    layout.view(buffer, "logit_rows")[:count] = ends[sampled] - 1
    targets = layout.view(buffer, "target_slots")
    targets[:] = max_num_seqs
    targets[:count] = plan.slots[sampled]
    layout.view(buffer, "position")[:count] = (plan.starts + plan.num_tokens)[sampled]
    layout.view(buffer, "top_k")[:count] = columns.top_k[sampled]
    layout.view(buffer, "seed")[:count] = columns.seed[sampled].view(np.int32)
    layout.view(buffer, "top_p").view(np.float32)[:] = 1.0
    for name in ("temperature", "top_p", "min_p"):
        values: np.ndarray = getattr(columns, name)
        layout.view(buffer, name).view(np.float32)[:count] = values[sampled]
