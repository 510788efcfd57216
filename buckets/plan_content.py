"""Plain content (what YAML and JSON give) to checked values, for the files of `buckets`.

Owns the errors that name the key that is wrong and the nearest known one. Knows no file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import cast

import yaml

from buckets.plan import InvalidPlan
from buckets.shape import StepShape

_EXPONENT = re.compile(r"\d+(\.\d+)?[eE][+-]?\d+")
SHAPE_NUMBERS = ("num_tokens", "num_seqs", "pages_per_seq", "num_logit_rows")
SHAPE_KEYS = (*SHAPE_NUMBERS, "variant")


def parse_yaml(text: str, what: str) -> object:
    """The content of YAML text; `InvalidPlan` where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the parser raises plain ones for bad dates
        raise InvalidPlan(f"{what} must be YAML: {error}") from error


def as_mapping(
    content: object, where: str, known: tuple[str, ...] | None = None
) -> Mapping[str, object]:
    """`content` as a mapping whose keys are text and, if given, among `known`."""
    if not isinstance(content, dict):
        raise InvalidPlan(f"{where} must be a mapping, got {type(content).__name__}")
    mapping = cast("dict[object, object]", content)
    for key in mapping:
        if not isinstance(key, str):
            raise InvalidPlan(f"{where} has the key {key!r}; keys must be text")
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise InvalidPlan(f"{where} has the unknown key {key!r}; nearest known: {near[0]}")
    return cast("Mapping[str, object]", mapping)


def as_list(content: object, where: str) -> list[object]:
    """`content` as a list."""
    if not isinstance(content, list):
        raise InvalidPlan(f"{where} must be a list, got {content!r}")
    return cast("list[object]", content)


def as_text(content: object, where: str) -> str:
    """`content` as text."""
    if not isinstance(content, str):
        raise InvalidPlan(f"{where} must be text, got {content!r}")
    return content


def as_whole(content: object, where: str) -> int:
    """`content` as a whole number."""
    if not isinstance(content, int) or isinstance(content, bool):
        raise InvalidPlan(f"{where} must be a whole number, got {content!r}")
    return content


def as_amount(content: object, where: str) -> float:
    """`content` as a finite number of at least 0."""
    if isinstance(content, str) and _EXPONENT.fullmatch(content):
        content = float(content)  # YAML 1.1 takes JSON's 1e-05 for text
    if not isinstance(content, int | float) or isinstance(content, bool):
        raise InvalidPlan(f"{where} must be a number, got {content!r}")
    if not (math.isfinite(content) and content >= 0):
        raise InvalidPlan(f"{where} must be finite and at least 0, got {content!r}")
    return float(content)


def as_shape(given: Mapping[str, object], where: str) -> StepShape:
    """The shape whose fields are among the keys of `given`."""
    numbers = {key: as_whole(given.get(key), f"{where}.{key}") for key in SHAPE_NUMBERS}
    return StepShape(**numbers, variant=as_text(given.get("variant", "full"), f"{where}.variant"))
