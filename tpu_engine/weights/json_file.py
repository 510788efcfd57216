"""Reading a JSON object from a model directory, with errors that name the file.

Owns nothing else; doesn't know what the objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from tpu_engine.errors import InvalidModel


def read_json_object(path: Path) -> dict[str, object]:
    """The object in `path`; `InvalidModel` where the file is missing or holds something else."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModel(f"{path}: the file is missing") from None
    except OSError as error:
        raise InvalidModel(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidModel(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidModel(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return cast(dict[str, object], value)
