"""A `Tokenizer` built from the vocabulary inside a GGUF file's metadata.

Owns the reading of the `tokenizer.ggml.*` keys: byte-level BPE (`gpt2`) with the pre-tokenizers
listed here, and sentencepiece BPE (`llama`). Other kinds are refused by name. Doesn't know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from tpu_engine.errors import InvalidModel
from tpu_engine.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_WHERE = "GGUF tokenizer"
_METASPACE = "\u2581"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Builds the tokenizer; `InvalidModel` naming the key that is missing or not supported.

    Control tokens become special tokens. BOS and EOS are added around a text as
    `add_bos_token` and `add_eos_token` say (BOS by default where llama.cpp does so).
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata), True
    else:
        raise _refusal("model", "gpt2 or llama", kind)
    _add_marked_tokens(backend, metadata)
    _set_text_borders(backend, metadata, adds_bos)
    return Tokenizer(backend, _WHERE)


def special_tokens_from_gguf(metadata: Mapping[str, object]) -> dict[str, str]:
    """The names chat templates use (`bos_token`, `eos_token`, ...) and their spelling."""
    pieces = _pieces(metadata)
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _token_id(metadata, key, len(pieces)) for name, key in keys.items()}
    return {f"{name}_token": pieces[i] for name, i in ids.items() if i is not None}


def _byte_level_bpe(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether BOS is added where the file doesn't say."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words: Any
    match pre:
        case "gpt-2":
            words = byte_level
        case "smollm":
            words = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
        case "llama-bpe":
            split = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
            alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            words = pre_tokenizers.Sequence([split, alphabet])
        case _:
            raise _refusal("pre", "one of gpt-2, smollm, llama-bpe", pre)
    is_llama3 = pre == "llama-bpe"
    vocab = _vocab(metadata)
    merges = _merges(metadata, vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _sentencepiece_bpe(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    vocab = _vocab(metadata)
    pieces = list(vocab)
    scores = _list(metadata, "scores", float)
    if len(scores) != len(pieces):
        raise _refusal("scores", f"one number for each of {len(pieces)} tokens", len(scores))
    unknown = _token_id(metadata, "unknown", len(pieces))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(vocab, scores),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    marks = normalizers.Replace(" ", _METASPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_METASPACE), marks]) if has_prefix else marks
    )
    steps: list[Any] = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps
    )
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges sentencepiece's scores amount to: each piece from any two others, best first."""
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token_id in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                order = (-scores[token_id], vocab[left], vocab[right])
                merges.append((*order, (left, right)))
    return [pair for *_, pair in sorted(merges)]


def _merges(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in _list(metadata, "merges", str):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise _refusal("merges", "pairs of tokens that form a token", text)
        merges.append((left, right))
    return merges


def _add_marked_tokens(backend: Any, metadata: Mapping[str, object]) -> None:
    pieces = _pieces(metadata)
    types = _list(metadata, "token_type", int)
    if len(types) != len(pieces):
        raise _refusal("token_type", f"one type for each of {len(pieces)} tokens", len(types))
    special = (_TokenType.CONTROL, _TokenType.UNKNOWN)
    marked = list(zip(pieces, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece, t in marked if t in special]
    )
    backend.add_tokens(
        [
            AddedToken(piece, normalized=False)
            for piece, token_type in marked
            if token_type == _TokenType.USER_DEFINED
        ]
    )


def _set_text_borders(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, object], adds_bos: bool
) -> None:
    pieces = _pieces(metadata)
    borders: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) is True:
            token_id = _token_id(metadata, name, len(pieces))
            if token_id is None:
                raise _refusal(f"{name}_token_id", f"set, as add_{name}_token is", None)
            borders[name] = (pieces[token_id], token_id)
    if borders:
        before, after = (borders[name][0] if name in borders else None for name in ("bos", "eos"))
        template = [part for part in (before, "$A", after) if part is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=list(borders.values())
        )


def _pieces(metadata: Mapping[str, object]) -> list[str]:
    return _list(metadata, "tokens", str)


def _vocab(metadata: Mapping[str, object]) -> dict[str, int]:
    pieces = _pieces(metadata)
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        twice = next(piece for token_id, piece in enumerate(pieces) if vocab[piece] != token_id)
        raise _refusal("tokens", "all different", twice)
    return vocab


def _token_id(metadata: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not (isinstance(value, int) and 0 <= value < num_tokens):
        raise _refusal(f"{name}_token_id", f"below the number of tokens ({num_tokens})", value)
    return value


def _list(metadata: Mapping[str, object], name: str, kind: type[_T]) -> list[_T]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    items = cast(list[object], value) if isinstance(value, list) else []
    if not items or not isinstance(items[0], kind):  # a GGUF array holds one type
        raise _refusal(name, f"a list of {kind.__name__}", items[0] if items else "none")
    return cast(list[_T], items)


def _refusal(name: str, limit: str, given: object) -> InvalidModel:
    return InvalidModel(f"{_WHERE}: tokenizer.ggml.{name} must be {limit}, got {given!r}")
