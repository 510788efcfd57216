"""`StepShape`: the compile key of one step program.

Owns the definition of a compiled shape and nothing else; no JAX, nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """One tuple of buckets: everything that decides which executable a step runs.

    Attributes:
        num_tokens: `T`, packed tokens the program computes (useful and padding).
        num_seqs: `B`, rows of the batch (sequences with at least one token in the step).
        pages_per_seq: `W`, width of the page table.
        num_logit_rows: rows for which logits are computed and sampled.
        variant: name of the program variant; "full" can run every row.
    """

    num_tokens: int
    num_seqs: int
    pages_per_seq: int
    num_logit_rows: int
    variant: str = "full"

    def __str__(self) -> str:
        return (
            f"tokens={self.num_tokens} seqs={self.num_seqs} pages={self.pages_per_seq} "
            f"logits={self.num_logit_rows} {self.variant}"
        )
