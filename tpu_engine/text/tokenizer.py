"""Text to token ids and back, the same for every kind of vocabulary.

Owns the one rule of how a token becomes bytes. Decoding joins the bytes of the tokens and then
reads UTF-8, so that a stream (`Detokenizer`) and a whole answer give the same text. Doesn't know
model directories or requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, cast

import tokenizers

from tpu_engine.errors import InvalidModel, InvalidRequest

_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(Enum):
    """What happens to the space a vocabulary puts before the first word of a text."""

    KEEP = "keep"
    STRIP_ONE = "strip_one"  # the first character of the text, if it is a space
    DROP_IN_FIRST_TOKEN = "drop_in_first_token"  # every word mark of the first token


class Tokenizer:
    """A vocabulary with its rules.

    Special tokens written out in a text (`<|im_end|>`) are read as those tokens, as in
    Hugging Face's libraries; `add_special_tokens` only rules what is put around the text (BOS).
    Text from a chat template already holds its special tokens: encode it with
    `add_special_tokens=False`.

    `vocab_size` is one more than the largest known id; a model's own vocabulary may be padded
    beyond it, and those ids decode to nothing. Instances are immutable.
    """

    def __init__(self, backend: tokenizers.Tokenizer, where: str) -> None:
        """`where` names the origin in errors; `InvalidModel` for a decoder that isn't supported."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        rules = _decoding_rules(backend, where)
        self.leading_space = rules.leading_space
        self._pieces: list[str | None] = [None] * self.vocab_size
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, token_id in vocab.items():
            self._pieces[token_id] = token
            self._bytes[token_id] = rules.token_bytes(token)

    @classmethod
    def from_json(cls, text: str, where: str) -> Tokenizer:
        """Reads the content of a `tokenizer.json`; `InvalidModel` where it isn't one."""
        try:
            # Of the library's readers the one that raises ValueError for bad content; `from_str`
            # raises a bare Exception.
            backend = tokenizers.Tokenizer.from_buffer(text.encode())
        except ValueError as error:
            raise InvalidModel(f"{where}: not a usable tokenizer: {error}") from None
        return cls(backend, where)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `InvalidRequest` where it holds surrogates (not valid Unicode)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            given = text[error.start : error.start + 8]
            raise InvalidRequest("text", "valid Unicode without surrogates", given) from None
        # The library lets other threads run only while it encodes a batch; long texts take seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that aren't UTF-8 become U+FFFD, one per malformed sequence.

        Equal to Hugging Face's decoding, except that where byte tokens form no valid UTF-8 only
        the malformed bytes are replaced, not the valid characters beside them.
        """
        stream = TextBytes(self, skip_special_tokens)
        return b"".join(map(stream.following, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token within a text; empty for an unknown id."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None for an unknown id."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else None

    def token_id(self, piece: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        return self._backend.token_to_id(piece)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises `InvalidRequest` naming `field` and the first id outside the vocabulary."""
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                limit = f"a token id from 0 to {self.vocab_size - 1}"
                raise InvalidRequest(f"{field}[{place}]", limit, token_id)


class TextBytes:
    """The bytes of one text, token after token: what depends on the tokens before is kept here."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = (
            tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        self._is_first = True  # no token was taken yet
        self._is_empty = True  # no token with bytes was

    def following(self, token_id: int) -> bytes:
        """The bytes this token adds: none for an unknown id and for a special token left out."""
        piece = self._tokenizer.piece(token_id)
        if piece is None or token_id in self._skipped:
            return b""
        raw = self._tokenizer.token_bytes(token_id)
        is_first, is_empty = self._is_first, self._is_empty
        self._is_first, self._is_empty = False, is_empty and not raw
        match self._tokenizer.leading_space:
            case LeadingSpace.STRIP_ONE if is_empty:
                return raw.removeprefix(b" ")
            case LeadingSpace.DROP_IN_FIRST_TOKEN if is_first:
                return piece.replace(_METASPACE, "").encode()
            case _:
                return raw


class _DecodingRules:
    """How one kind of decoder turns a token's spelling into bytes."""

    def __init__(self, is_byte_level: bool, leading_space: LeadingSpace, byte_tokens: bool) -> None:
        self.leading_space = leading_space
        self._byte_tokens = byte_tokens
        self._byte_of = _byte_level_alphabet() if is_byte_level else None

    def token_bytes(self, token: str) -> bytes:
        if self._byte_of is not None:
            try:
                return bytes([self._byte_of[char] for char in token])
            except KeyError:  # an added token is spelled as plain text
                return token.encode()
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_METASPACE, " ").encode()


def _decoding_rules(backend: tokenizers.Tokenizer, where: str) -> _DecodingRules:
    decoder: Any = backend.decoder
    state: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
    parts = cast(list[dict[str, Any]], state.get("decoders", [state] if state else []))
    kinds = [str(part["type"]) for part in parts]
    if kinds == ["ByteLevel"]:
        return _DecodingRules(True, LeadingSpace.KEEP, False)
    if kinds == ["Metaspace"] and parts[0].get("replacement") == _METASPACE:
        keeps = parts[0].get("prepend_scheme") == "never"
        leading = LeadingSpace.KEEP if keeps else LeadingSpace.DROP_IN_FIRST_TOKEN
        return _DecodingRules(False, leading, False)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_metaspace(parts[0]):
        if kinds[3:] == ["Strip"] and _strips_one_space(parts[3]):
            return _DecodingRules(False, LeadingSpace.STRIP_ONE, True)
        if not kinds[3:]:
            return _DecodingRules(False, LeadingSpace.KEEP, True)
    raise InvalidModel(
        f"{where}: decoder {state or None} is not supported (supported: ByteLevel; Metaspace; "
        "Replace + ByteFallback + Fuse, with or without Strip of one leading space)"
    )


def _replaces_metaspace(part: dict[str, Any]) -> bool:
    return part.get("pattern") == {"String": _METASPACE} and part.get("content") == " "


def _strips_one_space(part: dict[str, Any]) -> bool:
    return (part.get("content"), part.get("start"), part.get("stop")) == (" ", 1, 0)


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, inverted.

    Printable bytes stand for themselves, the others follow from U+0100 on in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
