"""Streaming text: whole characters, nothing lost, nothing of a stop string given out."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from tests import tiny_model
from tests.test_text_tokenizer import SPM_PIECES, byte_level, sentencepiece
from tpu_engine.errors import InvalidRequest
from tpu_engine.text.detokenizer import Detokenizer
from tpu_engine.text.stop_strings import StopMatcher
from tpu_engine.text.tokenizer import Tokenizer

TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": sentencepiece(),
    "metaspace": sentencepiece(decoders.Metaspace()),
    "metaspace_never": sentencepiece(decoders.Metaspace(prepend_scheme="never")),
}
EMOJI = byte_level().encode("😀 x ñ字")
ID_LISTS = st.lists(
    st.integers(-2, 520) | st.sampled_from(EMOJI) | st.integers(3, 258), max_size=40
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(ids=ID_LISTS, skips=st.booleans(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_deltas_join_to_the_whole_text(
    kind: str, ids: list[int], skips: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = Detokenizer(tokenizer, skip_special_tokens=skips)
    text, place = "", 0
    while place < len(ids):
        step = data.draw(st.integers(1, 5))
        text += stream.feed(ids[place : place + step])
        place += step
    assert text + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skips)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
@settings(max_examples=150, deadline=None)
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    stream = Detokenizer(TOKENIZERS["byte_level"], skip_special_tokens=False)
    deltas = [stream.feed([token]) for token in TOKENIZERS["byte_level"].encode(text)]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text
    assert stream.flush() == ""


def test_a_character_appears_with_its_last_byte() -> None:
    stream, ids = Detokenizer(byte_level()), byte_level().encode("😀")
    assert len(ids) == 4
    assert [stream.feed([token]) for token in ids] == ["", "", "", "😀"]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_unfinished_character_is_one_replacement_at_the_end(num_bytes: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀")[: 1 + num_bytes]
    stream = Detokenizer(tokenizer)
    assert stream.feed(ids) == "a"
    assert stream.flush() == "\ufffd"
    assert tiny_model.tokenizer().decode(ids) == "a\ufffd"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    for skips, expected in ((True, "ab"), (False, "a<|im_end|>b")):
        stream = Detokenizer(byte_level(), skip_special_tokens=skips)
        assert stream.feed(byte_level().encode("a<|im_end|>b")) == expected


def test_a_leading_space_is_dropped_once() -> None:
    he = SPM_PIECES.index("▁he")
    stream = Detokenizer(sentencepiece())
    assert [stream.feed([token]) for token in (1, he, he)] == ["", "he", " he"]


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Bytes that never form a character are the worst case for decoders that look back."""
    stream = Detokenizer(byte_level())
    continuation = byte_level().encode("字")[-1]

    def seconds(num_tokens: int) -> float:
        start = time.process_time()
        for _ in range(num_tokens):
            stream.feed([continuation])
        return time.process_time() - start

    first = seconds(20_000)
    seconds(100_000)
    assert seconds(20_000) < 10 * first + 0.1


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """Everything given out, and the stop string that matched."""
    matcher, text = StopMatcher(stops, include), ""
    for piece in pieces:
        result = matcher.feed(piece)
        text += result.text
        if result.matched is not None:
            assert matcher.feed("more").text == ""
            assert matcher.flush() == ""
            return text, result.matched
    return text + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "J", "K"], "ABC", "DEFGHIJ"),
        (("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "X"], "ABCDEFGHIX", None),
        (("DEFGHIJ",), ["ABCDEFGHI"], "ABCDEFGHI", None),
        (("stop",), ["st", "st", "op"], "st", "stop"),
        (("aab",), ["aaab"], "a", "aab"),
        (("END", "\n\n"), ["x\n", "\nEND"], "x", "\n\n"),
        (("abcd", "bc"), ["a", "b", "c", "d"], "a", "bc"),
        (("bc", "abc"), ["abc"], "", "abc"),
        (("ab", "abc"), ["abc"], "", "ab"),
        (("é",), ["caf", "é!"], "caf", "é"),
        ((), ["anything"], "anything", None),
    ],
)
def test_stop_strings(
    stops: tuple[str, ...], pieces: list[str], text: str, matched: str | None
) -> None:
    assert run(stops, pieces) == (text, matched)
    included = text + matched if matched else text
    assert run(stops, pieces, include=True) == (included, matched)


TEXTS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


@given(
    text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans()
)
@example(text="aab", stops=["ab", "aab"], cuts=[1, 2], include=False)
@settings(max_examples=400, deadline=None)
def test_the_result_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    got, matched = run(tuple(stops), pieces, include)
    assert (got, matched) == expected_stop(text, stops, include)


def expected_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, character by character: first complete stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=TEXTS, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_must_be(text: str, stops: list[str]) -> None:
    matcher, given_out = StopMatcher(stops), ""
    for place, char in enumerate(text, start=1):
        result = matcher.feed(char)
        if result.matched is not None:
            return
        given_out += result.text
        held = text[len(given_out) : place]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"stop\[1\]"):
        StopMatcher(["a", ""])


def test_stop_strings_span_tokens_and_bytes() -> None:
    """Through tokens: an emoji as a stop string arrives byte by byte."""
    tokenizer: Tokenizer = byte_level()
    stream, matcher, text = Detokenizer(tokenizer), StopMatcher(["😀!"]), ""
    for token in tokenizer.encode("so 😁😀! more"):
        result = matcher.feed(stream.feed([token]))
        text += result.text
        if result.matched:
            break
    assert (text, result.matched) == ("so 😁", "😀!")
