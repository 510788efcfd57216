"""The front without a server: defaults, checks, incremental output, the offline engine."""

from __future__ import annotations

import itertools
import random
from datetime import datetime
from typing import Any, cast

import pytest

from tests.fake_runner import expected_tokens
from tests.server_rig import CONFIG, EOS_ID, byte_tokenizer, fake_engine
from tpu_engine.errors import EngineError, InvalidRequest
from tpu_engine.front import Admitted, Ask, ChatMessage, ChatPrompt, Intake, TextPrompt, TokenPrompt
from tpu_engine.front_engine import open_intake
from tpu_engine.front_offline import OfflineEngine
from tpu_engine.front_output import Completion, OutputAssembler, Piece
from tpu_engine.messages import RequestOutput
from tpu_engine.request import Finish, FinishReason, Request, SamplingParams
from tpu_engine.step_plan import InFlight, StepResult
from tpu_engine.text.chat_template import ChatTemplate
from tpu_engine.weights.open_model import GenerationDefaults


def intake(**changes: Any) -> Intake:
    values: dict[str, Any] = {
        "tokenizer": byte_tokenizer(),
        "chat_template": ChatTemplate("{{ messages[0].content }}", {}),
        "vocab_size": 997,
        "max_model_len": 64,
        "eos_ids": frozenset({EOS_ID}),
        "draw_seed": lambda: 42,
        "today": lambda: datetime(2030, 1, 2),
        "defaults": GenerationDefaults(),
    }
    return Intake(**{**values, **changes})


def test_open_options_take_the_models_defaults_and_a_drawn_seed() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1)
    door = intake(defaults=defaults)
    params = door.admit(Ask(TokenPrompt((1, 2, 3))), 5.0).request.params
    assert params == SamplingParams(
        max_tokens=61, temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, seed=42
    )
    stated = Ask(TokenPrompt((1,)), temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    assert door.admit(stated, 5.0).request.params == SamplingParams(max_tokens=63)


def test_ids_are_unique_and_times_are_on_the_callers_clock() -> None:
    door = intake()
    first = door.admit(Ask(TokenPrompt((1,)), deadline_s=2.0), 10.0).request
    second = door.admit(Ask(TokenPrompt((1,)), deadline_s=2.0), 11.0, limit_s=0.5).request
    third = door.admit(Ask(TokenPrompt((1,))), 12.0).request
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    assert [first.arrival_s, second.arrival_s, third.arrival_s] == [10.0, 11.0, 12.0]
    assert [first.deadline_s, second.deadline_s, third.deadline_s] == [12.0, 11.5, None]


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    door = intake()
    assert door.admit(Ask(TextPrompt("x" * 63)), 0.0).request.params.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"at most 63 tokens.*'64 tokens'"):
        door.admit(Ask(TextPrompt("x" * 64)), 0.0)
    with pytest.raises(InvalidRequest, match=r"max_tokens must be from 1 to 4 .*got 5"):
        door.admit(Ask(TextPrompt("x" * 60), max_tokens=5), 0.0)


def test_lone_surrogates_are_refused_wherever_text_is() -> None:
    door = intake()
    asks = {
        "text": Ask(TextPrompt("a\ud800")),
        "chat.messages[0].content": Ask(ChatPrompt((ChatMessage("user", "\udfff"),))),
        "stop[0]": Ask(TextPrompt("a"), stop=("\ud800",)),
    }
    for field, ask in asks.items():
        with pytest.raises(InvalidRequest) as caught:
            door.admit(ask, 0.0)
        assert caught.value.field == field


def test_a_chat_needs_a_template_and_may_print_the_date() -> None:
    chat = ChatPrompt((ChatMessage("user", "hi"),))
    with pytest.raises(InvalidRequest, match="no chat template"):
        intake(chat_template=ChatTemplate(None, {})).tokenize(chat)
    door = intake(chat_template=ChatTemplate("{{ strftime_now('%Y') }}", {}))
    assert bytes(door.tokenizer.decode(door.tokenize(chat)), "ascii") == b"2030"
    with pytest.raises(InvalidRequest, match="at least 1 character"):
        intake(chat_template=ChatTemplate("", {})).tokenize(chat)


def assembler(stop: tuple[str, ...] = (), include: bool = False) -> OutputAssembler:
    params = SamplingParams(max_tokens=100, stop=stop, include_stop_in_output=include, seed=3)
    request = Request(7, (1, 2), params, arrival_s=100.0)
    return OutputAssembler(request, byte_tokenizer(), logprobs=True)


def output(ids: list[int], time_s: float, finish: Finish | None = None) -> RequestOutput:
    return RequestOutput(7, tuple(ids), tuple(-0.5 for _ in ids), time_s, 100.5, 2, finish)


def byte_ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def test_the_last_piece_has_usage_times_and_evidence() -> None:
    made = assembler()
    assert made.feed(output([], 100.7)) == Piece("", (), ())
    assert made.feed(output(byte_ids("a"), 101.0)).text == "a"
    last = made.feed(output([65, EOS_ID], 103.0, Finish(FinishReason.STOP, stop_token_id=EOS_ID)))
    assert last.token_ids == (65, EOS_ID)
    assert last.logprobs == (-0.5, -0.5)
    assert last.end is None
    assert last.completion == Completion(
        Finish(FinishReason.STOP, stop_token_id=EOS_ID),
        num_prompt_tokens=2,
        num_output_tokens=3,
        seed=3,
        queue_s=0.5,
        ttft_s=1.0,
        e2e_s=3.0,
    )


def test_a_stop_string_cuts_text_and_tokens_and_asks_for_the_end() -> None:
    made = assembler(stop=("STOP",))
    assert made.feed(output(byte_ids("aST"), 101.0)).text == "a"
    piece = made.feed(output(byte_ids("OPxyz"), 102.0))
    assert (piece.text, len(piece.token_ids)) == ("", 2)
    assert piece.completion is not None
    assert piece.completion.finish == Finish(FinishReason.STOP, stop_string="STOP")
    assert piece.completion.num_output_tokens == 5
    assert piece.end is not None
    assert (piece.end.request_id, piece.end.finish) == (7, piece.completion.finish)


def test_held_back_text_is_released_where_no_stop_string_came() -> None:
    made = assembler(stop=("STOP",))
    assert made.feed(output(byte_ids("aST"), 101.0)).text == "a"
    piece = made.feed(output(byte_ids("O"), 102.0, Finish(FinishReason.LENGTH)))
    assert piece.text == "STO"
    assert piece.completion is not None
    assert piece.completion.finish.reason is FinishReason.LENGTH


def test_the_stop_string_counts_even_on_the_last_token() -> None:
    made = assembler(stop=("ab",), include=True)
    piece = made.feed(output(byte_ids("xab"), 101.0, Finish(FinishReason.LENGTH)))
    assert piece.text == "xab"
    assert piece.completion is not None
    assert piece.completion.finish.stop_string == "ab"
    assert piece.end is None


def test_the_text_of_a_stop_token_is_shown_only_on_request() -> None:
    stop_id = byte_ids("!")[0]
    finish = Finish(FinishReason.STOP, stop_token_id=stop_id)
    assert assembler().feed(output([*byte_ids("ab"), stop_id], 101.0, finish)).text == "ab"
    shown = assembler(include=True)
    assert shown.feed(output([*byte_ids("ab"), stop_id], 101.0, finish)).text == "ab!"


def test_pieces_join_to_the_whole_text_however_tokens_arrive() -> None:
    rng = random.Random(0)
    tokenizer = byte_tokenizer()
    for _ in range(200):
        text = "".join(rng.choice("aé€😀 STOP\n") for _ in range(rng.randint(1, 30)))
        ids = byte_ids(text)
        ids = ids[: rng.randint(1, len(ids))]  # may end inside a character
        made = assembler(stop=("never here",))
        pieces: list[Piece] = []
        place = 0
        while place < len(ids):
            step = rng.randint(1, 4)
            finish = Finish(FinishReason.LENGTH) if place + step >= len(ids) else None
            pieces.append(made.feed(output(ids[place : place + step], 101.0, finish)))
            place += step
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
        assert [i for piece in pieces for i in piece.token_ids] == ids
        assert all("\ufffd" not in piece.text for piece in pieces[:-1])


def run_offline(asks: list[Ask], max_open: int = 4) -> tuple[dict[int, list[Any]], Any]:
    built = fake_engine()
    engine: OfflineEngine[int] = OfflineEngine(built.loop, open_intake(cast(Any, built)), max_open)
    found: dict[int, list[Any]] = {}
    for key, piece in engine.run(enumerate(asks)):
        found.setdefault(key, []).append(piece)
    return found, built


def test_the_offline_engine_answers_all_asks_and_frees_all_pages() -> None:
    asks = [
        Ask(TokenPrompt((i, 3, 5)), max_tokens=1 + i % 7, seed=i, ignore_eos=True)
        for i in range(30)
    ]
    asks[11] = Ask(TokenPrompt((1,)), max_tokens=0)
    found, built = run_offline(asks)
    assert sorted(found) == list(range(30))
    for index, pieces in found.items():
        if index == 11:
            assert [type(piece) for piece in pieces] == [InvalidRequest]
            continue
        params = SamplingParams(max_tokens=1 + index % 7, seed=index)
        want = expected_tokens(Request(0, (index, 3, 5), params, 0.0))
        assert [i for piece in pieces for i in piece.token_ids] == want
        assert pieces[-1].completion is not None
    status = built.loop.status()
    assert status.free_pages == status.total_pages == (CONFIG.num_pages or 0) - 1


def test_leaving_the_offline_engine_early_ends_what_is_open() -> None:
    built = fake_engine()
    engine: OfflineEngine[str] = OfflineEngine(built.loop, open_intake(cast(Any, built)), 4)
    asks = [(name, Ask(TokenPrompt((1,)), max_tokens=400, ignore_eos=True)) for name in "abcdef"]
    answers = engine.run(asks)
    for _ in range(20):
        next(answers)
    cast(Any, answers).close()
    assert built.loop.status().free_pages == built.loop.status().total_pages
    ask = Ask(TokenPrompt((9,)), max_tokens=2, seed=0, ignore_eos=True)
    assert not any(isinstance(piece, EngineError) for _, piece in engine.run([("x", ask)]))


def test_an_interrupt_inside_a_step_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    built = fake_engine()
    engine: OfflineEngine[int] = OfflineEngine(built.loop, open_intake(cast(Any, built)), 4)
    answers = engine.run([(0, Ask(TokenPrompt((1,)), max_tokens=400, ignore_eos=True))])
    for _ in range(5):
        next(answers)
    collect, num_steps = built.runner.collect, itertools.count()

    def interrupted(handle: InFlight) -> StepResult:
        if next(num_steps) == 0:
            raise KeyboardInterrupt
        return collect(handle)

    monkeypatch.setattr(built.runner, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(answers)


def test_admitted_requests_bring_their_assembler() -> None:
    admitted = intake().admit(Ask(TokenPrompt((1,))), 0.0)
    assert isinstance(admitted, Admitted)
    assert admitted.request.eos_ids == {EOS_ID}


def test_leaving_at_a_stop_string_ends_the_request_at_once() -> None:
    built = fake_engine()
    intake = open_intake(cast(Any, built))
    engine: OfflineEngine[int] = OfflineEngine(built.loop, intake, 4)
    params = SamplingParams(max_tokens=400, seed=0, ignore_eos=True)
    text = intake.tokenizer.decode(expected_tokens(Request(0, (9,), params, 0.0)))
    stop = next(char for char in text if char.isascii() and char.isalpha())
    ask = Ask(TokenPrompt((9,)), max_tokens=400, seed=0, stop=(stop,), ignore_eos=True)
    answers = engine.run([(0, ask)])
    assert any(cast(Any, piece).completion for _, piece in answers)  # stops at the last piece
    steps = built.loop.status().steps
    answers.close()
    assert built.loop.status().steps <= steps + 2
    assert built.loop.status().free_pages == built.loop.status().total_pages
