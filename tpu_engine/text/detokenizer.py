"""Token ids to text while they arrive.

Owns the state of one stream: whether text has begun and the bytes of an unfinished character.
Doesn't know stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tpu_engine.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer, piece by piece; the cost of a token doesn't depend on its place.

    The deltas of all `feed` calls and of `flush`, joined, are `tokenizer.decode` of all ids. A
    character is given out once complete, so U+FFFD only stands for bytes that can't become one.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._has_text = False

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._feed_one(token_id) for token_id in ids)

    def flush(self) -> str:
        """What is left at the end: U+FFFD where the last character is unfinished, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _feed_one(self, token_id: int) -> str:
        if self._tokenizer.is_skipped(token_id, self._skip_special_tokens):
            return ""
        raw = self._tokenizer.token_bytes(token_id, self._is_first, self._has_text)
        self._is_first = False
        self._has_text = self._has_text or bool(self._tokenizer.token_bytes(token_id))
        return self._utf8.decode(raw)
