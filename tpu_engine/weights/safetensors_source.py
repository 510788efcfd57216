"""Hugging Face safetensors directories as a `TensorSource`.

Owns which file of a directory holds which tensor, and the mapping of stored dtypes to NumPy's.
The container format is the `safetensors` package's. Knows no device and no model code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig
from tpu_engine.weights.json_file import read_json_object
from tpu_engine.weights.source import Array, Index, checked_index

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class SafetensorsSource:
    """The weights of one directory: `model.safetensors`, else the files of its index.

    Files stay mapped. Raises `InvalidModel` at construction naming the file that is missing, cut
    short or at odds with the index.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._config = config
        self._files: dict[str, Any] = {}
        for path, listed in _files(directory).items():
            opened = _opened(path)
            names = list(opened.keys())
            if listed is not None:
                _check_listed(path, listed, set(names))
            self._files |= dict.fromkeys(names, opened)
        for name in self._files:
            self.dtype(name)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype[Any]:
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise InvalidModel(f"tensor {name} has dtype {stored}, supported: {supported}")
        return _DTYPES[stored]

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorSource.read`; returns a copy of exactly the part asked for."""
        view = self._slice(name)
        shape = tuple(view.get_shape())
        part = checked_index(name, shape, index)
        empty = 0 in shape or any(cut.start == cut.stop for cut in part)
        return np.empty([c.stop - c.start for c in part], self.dtype(name)) if empty else view[part]

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise InvalidModel(f"there is no tensor {name}")
        return self._files[name].get_slice(name)


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Each weight file with the tensors the index says it holds (None: there is no index)."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        raise InvalidModel(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidModel(f"{index_path}: weight_map must be an object, got {weight_map!r}")
    files: dict[Path, set[str] | None] = {}
    for name, file_name in cast(dict[str, object], weight_map).items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise InvalidModel(
                f"{index_path}: tensor {name} must name a file of this folder, got {file_name!r}"
            )
        listed = files.setdefault(directory / file_name, set())
        cast(set[str], listed).add(name)
    return files


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise InvalidModel(f"{path}: the weight file is missing")
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{path}: {_damage(path) or error}") from None


def _damage(path: Path) -> str | None:
    """What the sizes say about a file the library refused; None where they say nothing."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or size < 8 + header_size:
            needed = 8 + header_size if size >= 8 else 8
            return f"cut short: the file has {size} bytes, its header alone needs {needed}"
        try:
            header = json.loads(file.read(header_size))
            ends = [info["data_offsets"][1] for key, info in header.items() if key[:2] != "__"]
            described = 8 + header_size + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None
    if size == described:
        return None
    damage = "cut short" if size < described else "damaged"
    return f"{damage}: the file has {size} bytes, its header describes {described}"


def _check_listed(path: Path, listed: set[str], held: set[str]) -> None:
    for name in sorted(listed - held):
        raise InvalidModel(f"{path}: tensor {name} is missing, although the index places it here")
    for name in sorted(held - listed):
        raise InvalidModel(f"{path}: tensor {name} is here, although the index doesn't place it")
