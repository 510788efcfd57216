"""Streams over loopback: equality, counts, stop strings, cancel, clients that leave, deadlines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from server.proto.tpu_engine.v1 import engine_pb2 as pb
from tests.fake_runner import expected_tokens
from tests.server_rig import CONFIG, EOS_ID, collect, ids_request, running_server
from tpu_engine.request import Request, SamplingParams


def expected(ids: list[int], max_tokens: int, seed: int, ignore_eos: bool = True) -> list[int]:
    """The fake model's answer, computed without any server."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    return expected_tokens(Request(0, tuple(ids), params, 0.0, eos_ids=frozenset({EOS_ID})))


async def until_the_end(
    stream: AsyncIterable[pb.GenerateResponse],
) -> tuple[pb.GenerateResponse, grpc.StatusCode]:
    """The last message of a stream, and its status."""
    last = pb.GenerateResponse()
    try:
        async for response in stream:
            last = response
    except grpc.aio.AioRpcError as error:
        return last, error.code()
    return last, grpc.StatusCode.OK


async def test_a_stream_is_the_models_answer_with_its_facts() -> None:
    async with running_server() as rig:
        prompt = list(b"hello")
        request = ids_request(prompt, max_tokens=40, seed=7, ignore_eos=True, logprobs=True)
        answer = await collect(rig.client.generate(request))
        want = expected(prompt, 40, 7)
        assert answer.token_ids == want
        assert answer.text == rig.built.model.tokenizer.decode(want)
        assert len(answer.logprobs) == 40
        assert answer.started.num_prompt_tokens == 5
        assert answer.started.seed == answer.finished.seed == 7
        finished = answer.finished
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert finished.WhichOneof("evidence") is None
        assert finished.usage == pb.Usage(num_prompt_tokens=5, num_output_tokens=40)
        timings = finished.timings
        assert 0 <= timings.queue_s <= timings.ttft_s <= timings.e2e_s < 10
        await rig.wait_idle()


async def test_open_options_are_filled_in_and_reported() -> None:
    async with running_server() as rig:
        call = rig.client.generate(ids_request([1, 2, 3], ignore_eos=True))
        answer = await collect(call)
        assert answer.started.max_tokens == 512 - 3
        assert answer.finished.usage.num_output_tokens == 509
        assert answer.token_ids == expected([1, 2, 3], 509, answer.started.seed)
        again = await collect(rig.client.generate(ids_request([1, 2, 3], max_tokens=1)))
        assert again.started.seed != answer.started.seed


async def test_text_chat_and_ids_are_the_same_prompt() -> None:
    async with running_server() as rig:
        text = "<user>hi<assistant>"
        ids = rig.built.model.tokenizer.encode(text)
        turn = pb.ChatMessage(role="user", content="hi")
        options: dict[str, Any] = {"max_tokens": 12, "seed": 1}
        requests = [
            pb.GenerateRequest(text=text, **options),
            pb.GenerateRequest(chat=pb.Chat(messages=[turn]), **options),
            ids_request(ids, **options),
        ]
        answers = [await collect(rig.client.generate(request)) for request in requests]
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        tokenized = await rig.client.tokenize(pb.TokenizeRequest(chat=requests[1].chat))
        assert list(tokenized.token_ids) == ids


async def test_the_eos_id_is_evidence_and_its_text_is_not_shown() -> None:
    async with running_server() as rig:
        for seed in range(3000):
            want = expected([5], 60, seed, ignore_eos=False)
            if want[-1] == EOS_ID and len(want) > 2:
                break
        answer = await collect(rig.client.generate(ids_request([5], max_tokens=60, seed=seed)))
        assert answer.token_ids == want
        assert answer.finished.reason == pb.FINISH_REASON_STOP
        assert answer.finished.stop_token_id == EOS_ID
        assert answer.text == rig.built.model.tokenizer.decode(want[:-1])


async def test_a_stop_string_ends_the_stream_and_nothing_of_it_leaks() -> None:
    async with running_server(step_s=0.002) as rig:
        want = expected([9, 9], 200, 3)
        text = rig.built.model.tokenizer.decode(want)
        stop = text[30:37]
        place = text.index(stop)
        request = ids_request([9, 9], max_tokens=200, seed=3, ignore_eos=True, stop=[stop])
        answer = await collect(rig.client.generate(request))
        assert answer.text == text[:place]
        assert answer.finished.reason == pb.FINISH_REASON_STOP
        assert answer.finished.stop_string == stop
        assert answer.finished.usage.num_output_tokens == len(answer.token_ids) < 200
        await rig.wait_idle()
        request.include_stop_in_output = True
        answer = await collect(rig.client.generate(request))
        assert answer.text == text[: place + len(stop)]


async def test_64_streams_of_mixed_lengths_finish_with_exact_counts() -> None:
    async with running_server() as rig:
        rng = random.Random(0)
        asks = [
            ([rng.randrange(256) for _ in range(rng.randint(1, 200))], rng.randint(1, 60), seed)
            for seed in range(64)
        ]
        calls = [
            collect(rig.client.generate(ids_request(ids, max_tokens=n, seed=seed, ignore_eos=True)))
            for ids, n, seed in asks
        ]
        answers = await asyncio.gather(*calls)
        for (ids, n, seed), answer in zip(asks, answers, strict=True):
            assert answer.token_ids == expected(ids, n, seed)
            assert answer.finished.usage.num_output_tokens == n
        await rig.wait_idle()


async def test_200_random_cancels_leak_nothing() -> None:
    async with running_server(step_s=0.001) as rig:
        rng = random.Random(1)

        async def one(index: int) -> None:
            ids = [rng.randrange(256) for _ in range(rng.randint(1, 150))]
            call = rig.client.generate(ids_request(ids, max_tokens=300, ignore_eos=True))
            stream = aiter(call)
            started = (await anext(stream)).started
            for _ in range(rng.randrange(11)):
                await anext(stream)
            if index % 2:
                call.cancel()
                return
            assert await rig.client.cancel(started.request_id)
            last, code = await until_the_end(stream)
            assert code is grpc.StatusCode.CANCELLED
            assert last.finished.reason == pb.FINISH_REASON_CANCELLED

        for batch in range(0, 200, 50):
            await asyncio.gather(*(one(index) for index in range(batch, batch + 50)))
        await rig.wait_idle()
        answer = await collect(rig.client.generate(ids_request([4], max_tokens=5, seed=0)))
        assert answer.token_ids == expected([4], 5, 0, ignore_eos=False)


async def test_cancel_ends_one_stream_with_a_last_message() -> None:
    async with running_server(step_s=0.005) as rig:
        call = rig.client.generate(ids_request([1], max_tokens=400, ignore_eos=True))
        other = asyncio.create_task(
            collect(rig.client.generate(ids_request([1], max_tokens=40, seed=2, ignore_eos=True)))
        )
        stream = aiter(call)
        events = [await anext(stream) for _ in range(4)]
        assert await rig.client.cancel(events[0].started.request_id)
        last, code = await until_the_end(stream)
        assert code is grpc.StatusCode.CANCELLED
        assert last.finished.reason == pb.FINISH_REASON_CANCELLED
        assert "Cancel" in last.finished.detail
        assert (await other).token_ids == expected([1], 40, 2)
        assert not await rig.client.cancel(events[0].started.request_id)
        await rig.wait_idle()


async def test_a_client_that_leaves_gives_its_pages_back_at_once() -> None:
    async with running_server(step_s=0.005) as rig:
        call = rig.client.generate(ids_request([1] * 300, max_tokens=200, ignore_eos=True))
        await call.read()
        await rig.wait_for(lambda s: s.running == 1)
        call.cancel()
        await rig.wait_idle()
        assert (await rig.client.status()).steps < 100


async def test_the_deadline_of_the_call_ends_the_request() -> None:
    async with running_server(step_s=0.02) as rig:
        request = ids_request([1], max_tokens=400, ignore_eos=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(rig.client.generate(request, timeout_s=0.2))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.wait_idle()


async def test_the_deadline_of_the_request_comes_with_a_last_message() -> None:
    async with running_server(step_s=0.02) as rig:
        request = ids_request([1], max_tokens=400, ignore_eos=True, deadline_s=0.2)
        last, code = await until_the_end(rig.client.generate(request))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert last.finished.reason == pb.FINISH_REASON_DEADLINE
        assert 0.15 < last.finished.timings.e2e_s < 5
        await rig.wait_idle()


async def test_more_streams_than_places_are_refused_with_a_retry_time() -> None:
    config = replace(CONFIG, max_num_seqs=2, max_waiting=1)
    async with running_server(config, step_s=0.02) as rig:
        endless = ids_request([1], max_tokens=500, ignore_eos=True)
        calls = [rig.client.generate(endless) for _ in range(3)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(rig.client.generate(ids_request([1], max_tokens=1)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await rig.wait_idle()
