"""Token ids to text while they arrive.

Owns the bytes of an unfinished character.
Doesn't know stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tpu_engine.text.tokenizer import TextBytes, Tokenizer


class Detokenizer:
    """The text of one answer, piece by piece; the cost of a token doesn't depend on its place.

    The deltas of all `feed` calls and of `flush`, joined, are `tokenizer.decode` of all ids. A
    character is given out once complete, so U+FFFD only stands for bytes that can't become one.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes = TextBytes(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._utf8.decode(b"".join(map(self._bytes.following, ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where the last character is unfinished, else nothing."""
        return self._utf8.decode(b"", final=True)
