"""The header of a GGUF file: metadata and where each tensor lies.

Owns the container format (version 2 and 3, little endian) and the check that the file is whole.
Every length is compared with the file's size before it is used, so a damaged header ends in one
clear error (the `gguf` package's reader loops for ever on some, and needs seconds for a large
vocabulary). Doesn't know what the keys mean, nor how quantised blocks are decoded.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tpu_engine.errors import InvalidModel

_T = TypeVar("_T")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_TENSOR_KINDS = {int(kind): kind for kind in GGMLQuantizationType}
_VALUE_KINDS = {int(kind): kind for kind in GGUFValueType}
_KIND = GGUFValueType
_SCALARS = {
    _KIND.UINT8: "<u1",
    _KIND.INT8: "<i1",
    _KIND.UINT16: "<u2",
    _KIND.INT16: "<i2",
    _KIND.UINT32: "<u4",
    _KIND.INT32: "<i4",
    _KIND.UINT64: "<u8",
    _KIND.INT64: "<i8",
    _KIND.FLOAT32: "<f4",
    _KIND.FLOAT64: "<f8",
    _KIND.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor: `shape` in NumPy order, `offset` and `num_bytes` within the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays as lists) and tensors by name, in file order."""

    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Reads the header and checks that every tensor lies within the file.

    Raises `InvalidModel` naming the file, what is wrong and, for a file cut short, both sizes.
    """
    size = path.stat().st_size
    if size < 24:
        raise InvalidModel(f"{path}: not a GGUF file: {size} bytes, the header alone needs 24")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Parser(path, data, size).header()


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise self._error(f"not a GGUF file: it begins with {self._data[:4]!r}")
        version = self._u32()
        if version not in _VERSIONS:
            raise self._error(f"GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors, num_keys = self._u64(), self._u64()
        metadata = self._named(num_keys, self._entry, "key")
        infos = self._named(num_tensors, self._tensor_info, "tensor")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, got {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors = {name: self._placed(name, base, alignment, *info) for name, info in infos.items()}
        self._check_whole(tensors)
        return GgufHeader(metadata, tensors)

    def _named(self, count: int, read: Callable[[], tuple[str, _T]], what: str) -> dict[str, _T]:
        items: dict[str, _T] = {}
        for _ in range(count):
            name, value = read()
            if name in items:
                raise self._error(f"{what} {name!r} appears twice")
            items[name] = value
        return items

    def _entry(self) -> tuple[str, object]:
        key = self._string()
        kind = self._value_type(key)
        if kind is not _KIND.ARRAY:
            return key, self._string() if kind is _KIND.STRING else self._scalars(kind, 1)[0]
        item_kind, count = self._value_type(key), self._u64()
        if item_kind is _KIND.ARRAY:
            raise self._error(f"key {key!r} holds nested arrays, which are not supported")
        if item_kind is not _KIND.STRING:
            return key, self._scalars(item_kind, count)
        return key, [self._string() for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(
                f"tensor {name!r} has {num_dims} dimensions, the limit is {_MAX_DIMS}"
            )
        dims = tuple(self._u64() for _ in range(num_dims))
        return name, (dims[::-1], self._u32(), self._u64())

    def _placed(
        self, name: str, base: int, alignment: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        if kind not in _TENSOR_KINDS:
            raise self._error(f"tensor {name!r} has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[_TENSOR_KINDS[kind]]
        if shape[-1] % block:
            raise self._error(
                f"tensor {name!r} of shape {shape} can't be of type "
                f"{_TENSOR_KINDS[kind].name}: rows must be a multiple of {block}"
            )
        if offset % alignment:
            raise self._error(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        num_bytes = math.prod(shape) // block * block_bytes
        return GgufTensor(name, shape, _TENSOR_KINDS[kind], base + offset, num_bytes)

    def _check_whole(self, tensors: dict[str, GgufTensor]) -> None:
        last = max(tensors.values(), key=lambda t: t.offset + t.num_bytes, default=None)
        if last is not None and last.offset + last.num_bytes > self._size:
            raise self._error(
                f"cut short: the file has {self._size} bytes, its header describes "
                f"{last.offset + last.num_bytes} (tensor {last.name!r})"
            )

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._u32()
        if number not in _VALUE_KINDS:
            raise self._error(f"key {key!r} has the unknown value type {number}")
        return _VALUE_KINDS[number]

    def _scalars(self, kind: GGUFValueType, count: int) -> list[int | float | bool]:
        dtype = np.dtype(_SCALARS[kind])
        self._require(count * dtype.itemsize)
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return values.tolist()

    def _string(self) -> str:
        raw = self._take(self._u64())
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"the header holds text that is not UTF-8: {raw[:40]!r}") from None

    def _u32(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def _u64(self) -> int:
        return struct.unpack("<Q", self._take(8))[0]

    def _take(self, count: int) -> bytes:
        self._require(count)
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def _require(self, count: int) -> None:
        if self._at + count > self._size:
            raise self._error(
                f"cut short or damaged: the header needs at least {self._at + count} bytes, "
                f"the file has {self._size}"
            )

    def _error(self, text: str) -> InvalidModel:
        return InvalidModel(f"{self._path}: {text}")
