"""The limits of every field a client may set, one check per field.

Owns the numbers and the wording of refusals: each check returns the value as it is or raises
`InvalidRequest` with field, limit and value. Never alters a value. Knows no request objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpu_engine.errors import InvalidRequest

MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**32 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_DEADLINE_S = 30 * 24 * 3600.0


def integer(name: str, value: int, largest: int) -> int:
    """`value`, which must lie in 0 .. `largest`."""
    if not 0 <= value <= largest:
        raise InvalidRequest(name, f"from 0 to {largest}", value)
    return value


def temperature(value: float) -> float:
    """0 (greedy), or large enough that float32 logits divided by it stay finite."""
    if value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        return value
    limit = f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    raise InvalidRequest("temperature", limit, value)


def top_p(value: float) -> float:
    """Above 0, at most 1."""
    if not 0 < value <= 1:
        raise InvalidRequest("top_p", "above 0 and at most 1", value)
    return value


def min_p(value: float) -> float:
    """From 0 to 1."""
    if not 0 <= value <= 1:
        raise InvalidRequest("min_p", "from 0 to 1", value)
    return value


def max_tokens(value: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """At least 1 and no more than `max_model_len` leaves; None takes all that is left."""
    left = max_model_len - num_prompt_tokens
    if value is None:
        return left
    if not 1 <= value <= left:
        raise InvalidRequest(
            "max_tokens",
            f"from 1 to {left} (max_model_len {max_model_len}, prompt {num_prompt_tokens})",
            value,
        )
    return value


def deadline(value: float | None) -> float | None:
    """A finite, positive number of seconds, or None."""
    if value is None:
        return None
    if not (math.isfinite(value) and 0 < value <= MAX_DEADLINE_S):
        raise InvalidRequest("deadline_s", f"above 0 and at most {MAX_DEADLINE_S:g} s", value)
    return value


def stop_strings(values: Sequence[str]) -> tuple[str, ...]:
    """Few, short and not empty."""
    if len(values) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(values)}")
    for index, value in enumerate(values):
        if not 1 <= len(value) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"stop[{index}]",
                f"from 1 to {MAX_STOP_STRING_CHARS} characters",
                f"{len(value)} characters",
            )
        unicode(f"stop[{index}]", value)
    return tuple(values)


def stop_token_ids(values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Few and in the vocabulary."""
    if len(values) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", len(values))
    return token_ids("stop_token_ids", values, vocab_size)


def token_ids(name: str, values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Every id in 0 .. `vocab_size` - 1."""
    if values and not (min(values) >= 0 and max(values) < vocab_size):
        index = next(i for i, value in enumerate(values) if not 0 <= value < vocab_size)
        raise InvalidRequest(
            f"{name}[{index}]", f"from 0 to {vocab_size - 1} (the vocabulary)", values[index]
        )
    return tuple(values)


def unicode(name: str, value: str) -> str:
    """Text that UTF-8 can carry: no lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            name, "valid Unicode", f"U+{ord(value[error.start]):04X} at {error.start}"
        ) from error
    return value
