"""What is compiled for a report: kernels, shapes, chips.

Owns the list of default cases. Loads no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tpu_engine.errors import InvalidConfig

Phase = Literal["decode", "mixed"]

# Which kernel a phase compiles: `phase` is what a row of the report is about.
KERNELS: dict[str, Phase] = {"decode_attention": "decode", "chunk_attention": "mixed"}
# Chips on which the shapes of most models are enough to see that everything compiles.
OLDER_CHIPS = ("v4", "v5p")
DEFAULT_CHIPS = (*OLDER_CHIPS, "v5e", "v6e", "tpu7x")

LATENT_DIM, ROPE_DIM = 512, 64  # of the DeepSeek family (arXiv:2405.04434), absorbed


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one shape.

    Attributes:
        kernel: name of the kernel, a key of `KERNELS`.
        n_q, n_kv, head_dim: as the model counts them.
        page: positions per page.
        kv_dtype, q_dtype: NumPy names.
        num_tokens, num_seqs: the step it is compiled for; of a mixed step, `num_tokens` is the
            chunk that the figures are about.
        is_latent: latent attention (MLA): one shared row per position.
    """

    kernel: str
    n_q: int
    n_kv: int
    head_dim: int
    page: int
    kv_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    num_tokens: int = 256
    num_seqs: int = 256
    is_latent: bool = False

    @property
    def phase(self) -> Phase:
        return KERNELS[self.kernel]

    @property
    def label(self) -> str:
        """Short, unique among the cases of one chip."""
        tokens = f" {self.num_tokens}" if self.phase == "mixed" else ""
        heads = f"{self.n_q}/{self.n_kv}/{self.head_dim}"
        return f"{self.phase}{tokens} {heads} page {self.page} {self.kv_dtype}"


def default_cases(chip: str, kernels: Sequence[str] = ()) -> list[KernelCase]:
    """The shapes that are reported for `chip`, of the named kernels (none: of all)."""
    for name in kernels:
        if name not in KERNELS:
            raise InvalidConfig("kernel", f"one of {', '.join(KERNELS)}", name)
    return [case for case in _cases(chip) if not kernels or case.kernel in kernels]


def _cases(chip: str) -> Iterator[KernelCase]:
    decode, chunk = KERNELS
    common = KernelCase(decode, 32, 8, 128, 128)
    mixed = replace(common, kernel=chunk, num_seqs=64, num_tokens=512)
    yield common
    yield replace(common, page=16)
    yield mixed
    if chip in OLDER_CHIPS:
        return
    for page in (128, 16):
        yield KernelCase(decode, 8, 2, 128, page)
    for page in (128, 64):
        yield KernelCase(decode, 16, 8, 256, page)
        yield KernelCase(decode, 4, 1, 256, page)
    for dtype in ("float8_e4m3fn", "int8"):
        yield replace(common, page=64, kv_dtype=dtype)
    yield KernelCase(decode, 32, 8, 64, 128)
    yield KernelCase(decode, 16, 1, LATENT_DIM + ROPE_DIM, 128, is_latent=True)
    yield replace(mixed, num_tokens=2048)
    yield replace(mixed, page=16)
    yield replace(mixed, n_q=16, head_dim=256)
