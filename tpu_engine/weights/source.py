"""The one way weights reach the model: named, typed, lazily read tensors of a checkpoint.

Owns `TensorSource` (what a file format must offer) and `check_tensors` (does this checkpoint hold
exactly what the model expects). Knows no file format, no device and no model code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig

Array = NDArray[Any]
Index = tuple[slice, ...]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Tensors some exporters store although they follow from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_COMPARED_BYTES = 1 << 24


class TensorSource(Protocol):
    """A checkpoint opened for reading; nothing large is in memory until `read`.

    Names are Hugging Face's (`model.layers.3.self_attn.q_proj.weight`), matrices are `[out, in]`,
    rows of Q and K are in the half-split RoPE order, whatever the file stores.
    """

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> tuple[str, ...]:
        """All tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """What `read` returns: the stored dtype, or float32 where the file is quantised."""
        ...

    def read(self, name: str, index: Index | None = None) -> Array:
        """The tensor, or its part `index`: one slice of step 1 for each leading dimension.

        Reads only what is asked for. The result may be a read-only view of the file.
        Raises `InvalidModel` for an unknown name or an index outside the shape.
        """
        ...


def check_tensors(source: TensorSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `InvalidModel` unless `source` holds exactly the `expected` names and shapes.

    Reads no weights but one: a stored `lm_head.weight` is accepted under a config that ties it to
    the embedding only where both hold the same numbers.
    """
    held = set(source.names())
    for name, shape in expected.items():
        if name not in held:
            hint = " (the config does not tie it to the embedding)" if name == LM_HEAD else ""
            raise InvalidModel(f"tensor {name} of shape {shape} is missing{hint}")
        if source.shape(name) != shape:
            raise InvalidModel(f"tensor {name} has shape {source.shape(name)}, expected {shape}")
    for name in source.names():
        if name in expected or name.endswith(_DERIVED_SUFFIX):
            continue
        if name == LM_HEAD and source.config.tie_embeddings:
            _check_tied(source)
            continue
        raise InvalidModel(f"tensor {name} of shape {source.shape(name)} is not part of the model")


def checked_index(name: str, shape: tuple[int, ...], index: Index | None) -> Index:
    """`index` with one explicit in-range slice per dimension; `InvalidModel` where it can't be."""
    given = index or ()
    if len(given) > len(shape):
        raise InvalidModel(f"tensor {name} has shape {shape}, can't be indexed by {index}")
    filled = given + (slice(None),) * (len(shape) - len(given))
    return tuple(_checked_slice(name, size, part) for size, part in zip(shape, filled, strict=True))


def _checked_slice(name: str, size: int, part: slice) -> slice:
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise InvalidModel(f"tensor {name}: {part} does not lie in a dimension of {size}")
    return slice(start, stop)


def row_blocks(rows: slice, row_bytes: int, block_bytes: int) -> Iterator[slice]:
    """Cuts `rows` into consecutive slices of at most about `block_bytes` (at least one row)."""
    step = max(1, block_bytes // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def _check_tied(source: TensorSource) -> None:
    shape, embedding_shape = source.shape(LM_HEAD), source.shape(EMBEDDING)
    if shape != embedding_shape:
        raise InvalidModel(
            f"tensor {LM_HEAD} has shape {shape}, expected {embedding_shape}: "
            f"the config ties it to {EMBEDDING}"
        )
    row_bytes = shape[1] * source.dtype(LM_HEAD).itemsize
    for rows in row_blocks(slice(0, shape[0]), row_bytes, _COMPARED_BYTES):
        if not np.array_equal(source.read(LM_HEAD, (rows,)), source.read(EMBEDDING, (rows,))):
            raise InvalidModel(
                f"tensor {LM_HEAD} differs from {EMBEDDING}, to which the config ties it "
                f"(first in rows {rows.start}..{rows.stop - 1}): set tie_word_embeddings to false"
            )
