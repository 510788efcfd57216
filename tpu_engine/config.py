"""Frozen configuration of one engine, with the checks that need no model and no device.

Owns the option names. Derived values are new objects from pure functions; nobody changes a
configuration after it was built. Knows no file format (the CLI reads YAML/TOML).
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_engine.errors import InvalidConfig

DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
QUANTIZATIONS = ("none", "int8")
ON_MISS = ("refuse", "compile")
ATTENTIONS = ("auto", "xla", "pallas", "pallas-interpret")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything a person may choose about the engine; `None` and "auto" mean derived.

    Attributes:
        model: a Hugging Face directory, a `.gguf` file, or the name of an installed demo model.
        dtype: of weights and activations; auto is bfloat16 on TPU, float32 on CPU.
        kv_dtype: of the KV cache; auto follows `dtype`, float8_e4m3fn halves bfloat16's bytes.
        quantize: "none", or "int8" (weights only, one scale per output channel).
        attention: the Pallas kernels (pallas needs a TPU, pallas-interpret runs them anywhere,
            very slowly) or XLA alone (xla); auto is pallas on TPU, xla on CPU.
        page_size: token positions per page.
        num_pages: pages in the pool, null page included; derived from memory if not given.
        max_model_len: prompt plus output tokens of one request; the model's own limit, but at most
            4096, if not given.
        max_num_seqs: sequences that may hold a slot at once.
        max_num_batched_tokens: tokens of the largest step.
        max_waiting: requests that may wait for admission before new ones are refused.
        max_chunk: largest prefill chunk of one request in one step; as large as the step
            if not given.
        tensor_parallel: devices on the `tensor` mesh axis.
        hbm_reserve: share of a device's memory left to its runtime and to fragmentation.
        overlap: plan and dispatch step N+1 before the tokens of step N are read back.
        plan: file with the shapes to compile and serve with; derived from the limits if not given.
        compile_cache: folder for compiled programs, or an address like gs://bucket/folder; an
            empty name keeps them in memory only. The commands take `~/.cache/tpu_engine` if not
            given.
        canary: run every program once on known tokens before serving, and compare the results.
        signing_key: file with the secret that signs stored programs; unsigned ones are refused.
        require_warm: refuse to start where the compile cache lacks a program, or holds a damaged
            or refused one, instead of compiling it.
        on_miss: what a step does that has no compiled program ("refuse" ends its requests with an
            error, "compile" lets all wait for the compiler).
    """

    model: str
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantize: str = "none"
    attention: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    max_waiting: int = 1024
    max_chunk: int | None = None
    tensor_parallel: int = 1
    hbm_reserve: float = 0.08
    overlap: bool = True
    plan: str | None = None
    compile_cache: str | None = None
    canary: bool = True
    signing_key: str | None = None
    require_warm: bool = False
    on_miss: str = "refuse"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("attention", self.attention, ATTENTIONS)
        if not 0 <= self.hbm_reserve < 0.9:
            raise InvalidConfig("hbm_reserve", "from 0 to 0.9", self.hbm_reserve)
        _one_of("on_miss", self.on_miss, ON_MISS)
        if self.require_warm and self.on_miss != "refuse":
            raise InvalidConfig("on_miss", "refuse where require_warm is set", self.on_miss)
        if self.require_warm and self.compile_cache == "":
            raise InvalidConfig("require_warm", "off where no compile_cache is kept", True)
        if self.page_size not in (8, 16, 32, 64, 128, 256):
            raise InvalidConfig("page_size", "one of 8, 16, 32, 64, 128, 256", self.page_size)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "tensor_parallel"):
            _at_least_one(name, getattr(self, name))
        if self.max_model_len is not None and self.max_model_len < 2:
            limit = "at least 2 (one token of prompt, one of output)"
            raise InvalidConfig("max_model_len", limit, self.max_model_len)
        for name in ("num_pages", "max_chunk"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidConfig(
                "max_num_seqs",
                f"at most max_num_batched_tokens ({self.max_num_batched_tokens})",
                self.max_num_seqs,
            )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(option, "one of " + ", ".join(allowed), value)


def _at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise InvalidConfig(option, "at least 1", value)
