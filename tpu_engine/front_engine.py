"""From a built engine to the front: the intake of its model, and an engine without a server.

Owns the wiring that server and offline commands share. Imports the builder (and with it JAX) only
when an engine is really built.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from tpu_engine.config import EngineConfig
from tpu_engine.front import Intake

if TYPE_CHECKING:
    from tpu_engine.build import BuiltEngine, Progress


def build_real_engine(
    config: EngineConfig,
    progress: Callable[[Progress], None] | None = None,
    *,
    partial: bool = False,
) -> BuiltEngine:
    """`tpu_engine.build.build_engine`, imported on first use."""
    from tpu_engine.build import build_engine

    return build_engine(config, progress, partial=partial)


def open_intake(built: BuiltEngine) -> Intake:
    """The door of `built`'s model, with seeds from the operating system's entropy."""
    model = built.model
    max_model_len = built.config.max_model_len
    assert max_model_len is not None, "the builder fills in every derived option"
    return Intake(
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        vocab_size=model.tokenizer.vocab_size,
        max_model_len=max_model_len,
        eos_ids=model.config.eos_ids,
        draw_seed=lambda: secrets.randbits(32),
        today=datetime.now,
        defaults=model.generation_defaults,
    )
