"""Tokenizers: the same text and ids as the library's own, for every kind of vocabulary."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests import tiny_model
from tpu_engine.errors import InvalidModel, InvalidRequest
from tpu_engine.text.gguf_tokenizer import special_tokens_from_gguf, tokenizer_from_gguf
from tpu_engine.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 511), max_size=40)
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM_PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *BYTE_PIECES,
    "▁",
    *"abchelotr",
    "▁h",
    "he",
    "▁he",
    "ll",
    "▁▁",
]


def byte_level() -> Tokenizer:
    return Tokenizer(tiny_model.tokenizer(), "tiny")


def sentencepiece(decoder: Any = None) -> Tokenizer:
    """Byte tokens and word marks; the ids above the pieces are unknown."""
    vocab = {piece: number for number, piece in enumerate(SPM_PIECES)}
    backend: Any = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoder or decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(SPM_PIECES[:3])
    return Tokenizer(backend, "spm")


def gguf_metadata(**changes: object) -> dict[str, object]:
    """The tiny vocabulary as GGUF metadata."""
    state = json.loads(tiny_model.tokenizer().to_str())
    pieces = list(state["model"]["vocab"])
    metadata: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": pieces,
        "token_type": [3 if piece in tiny_model.SPECIAL_TOKENS else 1 for piece in pieces],
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()}


BACKEND = tiny_model.tokenizer()
BYTE_LEVEL = byte_level()
GGUF_BYTE_LEVEL = tokenizer_from_gguf(gguf_metadata())


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@given(ids=IDS, skips=st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_decoding_is_the_librarys(ids: list[int], skips: bool) -> None:
    expected = BACKEND.decode(ids, skip_special_tokens=skips)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skips) == expected


@given(ids=IDS, skips=st.booleans(), prepends=st.sampled_from(["always", "never", "first"]))
@settings(max_examples=200, deadline=None)
def test_metaspace_decoding_is_the_librarys(ids: list[int], skips: bool, prepends: Any) -> None:
    tokenizer = sentencepiece(decoders.Metaspace(prepend_scheme=prepends))
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skips)  # pyright: ignore
    assert tokenizer.decode(ids, skip_special_tokens=skips) == expected


@given(parts=st.lists(st.sampled_from(["▁he", "ll", "o", "▁", "▁▁", "</s>", "é", "😀", "字"])))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_decoding_is_the_librarys_for_valid_bytes(parts: list[str]) -> None:
    tokenizer = sentencepiece()
    ids: list[int] = []
    for part in parts:
        known = tokenizer.token_id(part)
        spelled = [f"<0x{byte:02X}>" for byte in part.encode()] if known is None else [part]
        ids += [SPM_PIECES.index(piece) for piece in spelled]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)  # pyright: ignore


def test_malformed_byte_tokens_cost_only_themselves() -> None:
    ids = [SPM_PIECES.index(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff"]
    assert sentencepiece().decode(ids) == "é\ufffd"


def test_leading_space() -> None:
    tokenizer, he, space = sentencepiece(), SPM_PIECES.index("▁he"), SPM_PIECES.index("▁")
    assert tokenizer.decode([he, he]) == "he he"
    assert tokenizer.decode([1, he]) == "he"
    assert tokenizer.decode([space, he]) == " he"
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(" the")) == " the"


def test_special_tokens_in_text_are_read_as_such() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([2, 1]) == ""
    assert tokenizer.decode([2, 1], skip_special_tokens=False) == "<|im_end|><|im_start|>"


def test_added_tokens_that_are_not_special_stay_in_the_text() -> None:
    backend: Any = tiny_model.tokenizer()
    backend.add_tokens([AddedToken("<é tool>", normalized=False)])
    tokenizer = Tokenizer(backend, "tiny")
    assert tokenizer.encode("<é tool>") == [512]
    assert tokenizer.decode([512]) == "<é tool>" == backend.decode([512])
    assert tokenizer.vocab_size == 513


def test_ids_outside_the_vocabulary() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode([600, -1, 10**12]) == ""
    assert tokenizer.piece(600) is None
    assert tokenizer.piece(2) == "<|im_end|>"
    tokenizer.check_ids("prompt_ids", [0, 511])
    for wrong in (-1, 512, 2**40):
        with pytest.raises(InvalidRequest, match=rf"prompt_ids\[1\] .* 0 to 511, got {wrong}"):
            tokenizer.check_ids("prompt_ids", [0, wrong])


def test_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        byte_level().encode("a\ud800b")


def test_a_tokenizer_file_neither_truncates_nor_pads() -> None:
    backend: Any = tiny_model.tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend, "tiny").encode("a" * 100)) == 100
    assert len(Tokenizer.from_json(backend.to_str(), "tiny").encode("a")) == 1


def test_unsupported_decoders_are_named() -> None:
    backend: Any = tiny_model.tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidModel, match=r"tiny: decoder .*WordPiece.*supported: ByteLevel"):
        Tokenizer(backend, "tiny")


@given(text=st.text(max_size=60) | st.text("the 019'\n\tñ", max_size=60))
@settings(max_examples=150, deadline=None)
def test_gguf_byte_level_encodes_like_the_original(text: str) -> None:
    assert GGUF_BYTE_LEVEL.encode(text) == BYTE_LEVEL.encode(text)


def test_gguf_text_borders() -> None:
    assert tokenizer_from_gguf(gguf_metadata()).encode("the") == BYTE_LEVEL.encode("the")
    both = tokenizer_from_gguf(gguf_metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode("the") == [1, *BYTE_LEVEL.encode("the"), 2]
    assert both.encode("the", add_special_tokens=False) == BYTE_LEVEL.encode("the")
    names = special_tokens_from_gguf(gguf_metadata(unknown_token_id=0))
    assert names == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }


def test_llama3_words() -> None:
    """Three digits at a time, line breaks apart, letters with the space before them; BOS first."""
    tokenizer = tokenizer_from_gguf(gguf_metadata(pre="llama-bpe"))
    words: Any = tokenizer._backend.pre_tokenizer  # pyright: ignore
    split = [piece for piece, _ in words.pre_tokenize_str("I'm 12345, ok\n\nNow")]
    assert split == ["I", "'m", "Ġ", "123", "45", ",", "Ġok", "ĊĊ", "Now"]
    assert tokenizer.encode("the")[0] == 1


def test_gguf_sentencepiece_matches_the_original(shared_dir: Path) -> None:
    """The tinyllamas vocabulary as GGUF holds it: pieces with scores instead of merges."""
    folder = shared_dir / "assets" / "stories260K"
    text = (folder / "tokenizer.json").read_text()
    original = Tokenizer.from_json(text, "stories260K")
    pieces = list(json.loads(text)["model"]["vocab"])
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)]
    built = tokenizer_from_gguf(
        gguf_metadata(
            model="llama", tokens=pieces, token_type=types, scores=scores, unknown_token_id=0
        )
    )
    samples = [entry["prompt"] for entry in json.loads((folder / "golden.json").read_text())]
    for sample in [*samples, "Lily  was happy. 😀é\n", "", " x", "<s>One day"]:
        ids = original.encode(sample)
        assert built.encode(sample) == ids
        assert built.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "model must be gpt2 or llama, got 'bert'"),
        ({"pre": "qwen2"}, "pre must be one of gpt-2, smollm, llama-bpe, got 'qwen2'"),
        ({"tokens": []}, "tokens must be a list of str"),
        ({"tokens": ["a", "a"], "merges": ["a a"]}, "tokens must be all different, got 'a'"),
        ({"token_type": [1]}, "token_type must be one type for each of 512"),
        ({"merges": ["q zebra"]}, "merges must be pairs of tokens.*zebra"),
        ({"model": "llama"}, "scores must be a list of float"),
        ({"model": "llama", "scores": [0.5]}, "scores must be one number for each"),
        ({"bos_token_id": 512}, "bos_token_id must be below the number of tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id must be set"),
    ],
)
def test_unsupported_gguf_vocabularies_are_named(changes: dict[str, object], named: str) -> None:
    metadata = gguf_metadata(**{"add_bos_token": True, **changes})
    with pytest.raises(InvalidModel, match=named):
        tokenizer_from_gguf(metadata)


def test_a_pre_tokenizer_that_joins_digits_would_be_seen() -> None:
    """smollm splits digits: the tiny vocabulary has no pair of digits, so look at the words."""
    words: Any = GGUF_BYTE_LEVEL._backend.pre_tokenizer  # pyright: ignore
    assert [piece for piece, _ in words.pre_tokenize_str("a 12")] == ["a", "Ġ", "1", "2"]
    plain: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert [piece for piece, _ in plain.pre_tokenize_str("a 12")] == ["a", "Ġ12"]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer.from_json(tiny_model.tokenizer().to_str(), "tiny")
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    start_s = time.monotonic()
    tokenizer.encode("hello world, these are words " * 30_000)
    end_s = time.monotonic()
    done.set()
    ticker.join()
    assert sum(start_s < at < end_s for at in ticks) >= 5
