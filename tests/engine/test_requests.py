"""A request ends in one way, when it should, and takes no other request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.record import EngineDied, EngineError

Fixture = Callable[..., Any]


def test_a_stop_token_ends_the_turn_and_is_part_of_it_once(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            free = (await engine.generate(request_of(prompt(5), seed=3, max_tokens=40))).token_ids.tolist()
            stop = free[10]
            first = free.index(stop)
            result = await engine.generate(request_of(prompt(5), seed=3, max_tokens=40, stop=(stop, 96)))
            assert result.token_ids.tolist() == free[: first + 1]
            assert result.finish_reason == "stop"
            assert len(result.logprobs) == len(result.versions) == first + 1

    asyncio.run(play())


def test_a_stop_token_at_the_limit_is_a_stop(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            token = int((await engine.generate(request_of(prompt(5), seed=3, max_tokens=1))).token_ids[0])
            result = await engine.generate(request_of(prompt(5), seed=3, max_tokens=1, stop=(token,)))
            assert result.finish_reason == "stop"
            assert result.token_ids.tolist() == [token]

    asyncio.run(play())


def test_a_stop_token_in_the_prompt_ends_nothing(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            free = await engine.generate(request_of(prompt(5), seed=3, max_tokens=6))
            absent = next(token for token in range(97) if token not in free.token_ids)
            result = await engine.generate(request_of([absent, *prompt(5)], seed=3, max_tokens=6, stop=(absent,)))
            assert len(result.token_ids) >= 1
            assert absent not in result.token_ids[:-1]

    asyncio.run(play())


def test_more_requests_than_slots_all_end(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=3) as engine:
            limits = [1 + i % 7 for i in range(40)]
            requests = [request_of(prompt(1 + i % 11, i), seed=i, max_tokens=n) for i, n in enumerate(limits)]
            results = await asyncio.gather(*map(engine.generate, requests))
            assert [len(result.token_ids) for result in results] == limits
            assert [result.request_id for result in results] == [request.request_id for request in requests]
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.generated_tokens == sum(limits)
            assert stats.prompt_tokens == sum(len(request.token_ids) for request in requests)
            assert stats.busy_seconds > 0

    asyncio.run(play())


@pytest.mark.parametrize("place", ["first", "middle", "last", "waiting"])
def test_abort_returns_what_there_is_and_leaves_the_others_alone(
    place: str,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
    steps_of: Fixture,
) -> None:
    model = new_model()
    aborted = {"first": 0, "middle": 1, "last": 2, "waiting": 3}[place]

    async def play() -> None:
        async with start_engine(model, max_batch_size=3) as engine:
            steps = steps_of(engine)
            steps.hold_at(5)
            requests = [request_of(prompt(4 + i), seed=i, max_tokens=30) for i in range(4)]
            calls = [asyncio.create_task(engine.generate(request)) for request in requests]
            await asyncio.to_thread(steps.reached)
            abort = asyncio.create_task(engine.abort([requests[aborted].request_id, "unknown"]))
            await asyncio.sleep(0)
            steps.release()
            await abort
            for number, result in enumerate(await asyncio.gather(*calls)):
                if number == aborted:
                    assert result.finish_reason == "abort"
                    assert len(result.token_ids) == (0 if place == "waiting" else 5)
                else:
                    assert result.finish_reason == "length"
                expected = reference_logprobs(model, prompt(4 + number), result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)

    asyncio.run(play())


def test_cancelling_the_caller_frees_the_slot(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, steps_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=2) as engine:
            steps = steps_of(engine)
            steps.hold_at(3)
            long = [asyncio.create_task(engine.generate(request_of(prompt(4), seed=i, max_tokens=900))) for i in (1, 2)]
            short = asyncio.create_task(engine.generate(request_of(prompt(4), seed=3, max_tokens=2)))
            await asyncio.to_thread(steps.reached)
            long[0].cancel()
            await asyncio.wait([long[0]])
            steps.release()
            assert len((await short).token_ids) == 2
            assert not long[1].done()
            long[1].cancel()
            results = await asyncio.gather(*long, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await engine.pause()
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)

    asyncio.run(play())


def test_a_paused_engine_samples_nothing_and_goes_on_where_it_was(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, steps_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=2) as engine:
            request = request_of(prompt(6), seed=1, max_tokens=12)
            undisturbed = await engine.generate(request)
            steps = steps_of(engine)
            steps.hold_at(4)
            running = asyncio.create_task(engine.generate(request))
            await asyncio.to_thread(steps.reached)
            pause = asyncio.create_task(engine.pause())
            await asyncio.sleep(0)
            steps.release()
            await pause
            queued = asyncio.create_task(engine.generate(request_of(prompt(6), seed=2, max_tokens=2)))
            before = await engine.stats()
            await engine.abort([])  # the computing thread has been round once more
            after = await engine.stats()
            assert before.generated_tokens == after.generated_tokens == 12 + 4
            assert not running.done() and not queued.done()
            await engine.resume()
            assert (await running).token_ids.tolist() == undisturbed.token_ids.tolist()
            assert len((await queued).token_ids) == 2
            assert 0 < (await engine.stats()).paused_seconds < 10

    asyncio.run(play())


def test_a_request_can_be_aborted_while_the_engine_is_paused(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            await engine.pause()
            call = asyncio.create_task(engine.generate(request_of(prompt(4), seed=1)))
            await asyncio.sleep(0)
            await engine.abort(["r1"])
            assert (await call).finish_reason == "abort"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [1] * 60, "max_tokens": 5}, "prompt of 60 and max_tokens 5 do not fit.*max_model_len 64"),
        ({"ids": []}, "prompt of 0"),
        ({"ids": [1, 97]}, "ids from 1 to 97, the model has 97 tokens"),
        ({"ids": [-1, 3]}, "ids from -1 to 3"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": 0}, "val.top_k is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"stop_texts": ("x",)}, r"no tokenizer to find the stop texts \('x',\) with"),
        ({"min_version": 1}, "asked for version 1, but the engine is at 0"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(
    change: dict[str, Any], message: str, new_model: Fixture, start_engine: Fixture, request_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_model_len=64) as engine:
            other = asyncio.create_task(engine.generate(request_of([1, 2], seed=1, max_tokens=20)))
            with pytest.raises(EngineError, match=message):
                await engine.generate(request_of(**{"ids": [1, 2, 3], **change}))
            assert len((await other).token_ids) == 20

    asyncio.run(play())


def test_a_sequence_of_exactly_the_longest_length_is_served(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_model_len=64) as engine:
            assert len((await engine.generate(request_of(prompt(59), max_tokens=5))).token_ids) == 5

    asyncio.run(play())


def test_a_failing_forward_fails_all_requests_and_all_later_calls(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, steps_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=2) as engine:
            steps = steps_of(engine)
            steps.hold_at(2)
            watching = asyncio.create_task(engine.watch())
            calls = [asyncio.create_task(engine.generate(request_of(prompt(4), seed=i))) for i in range(4)]
            await asyncio.to_thread(steps.reached)
            pause = asyncio.create_task(engine.pause())
            await asyncio.sleep(0)

            def out_of_memory(*_: Any) -> None:
                raise RuntimeError("out of memory")

            engine._batch._model.register_forward_hook(out_of_memory)
            steps.release()
            for result in await asyncio.wait_for(
                asyncio.gather(*calls, watching, pause, return_exceptions=True), timeout=10
            ):
                assert isinstance(result, EngineDied) and "out of memory" in str(result)
            for call in (
                engine.generate(request_of(prompt(4))),
                engine.pause(),
                engine.resume(),
                engine.abort(["r0"]),
                engine.stats(),
                engine.watch(),
            ):
                with pytest.raises(EngineDied, match="out of memory"):
                    await asyncio.wait_for(call, timeout=10)

    asyncio.run(play())


def test_cancelling_a_request_of_a_failed_engine_is_still_a_cancellation(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, steps_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            steps = steps_of(engine)
            steps.hold_at(1)
            call = asyncio.create_task(engine.generate(request_of(prompt(4))))
            await asyncio.to_thread(steps.reached)
            engine._ended = "the engine has failed"  # before the caller's future is told
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            engine._ended = ""
            steps.release()

    asyncio.run(play())


def test_closing_aborts_what_runs_and_refuses_what_comes_later(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, steps_of: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=1) as engine:
            steps = steps_of(engine)
            steps.hold_at(3)
            calls = [asyncio.create_task(engine.generate(request_of(prompt(4), seed=i))) for i in range(2)]
            await asyncio.to_thread(steps.reached)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            steps.release()
            running, waiting = await asyncio.gather(*calls)
            assert (running.finish_reason, len(running.token_ids)) == ("abort", 3)
            assert (waiting.finish_reason, len(waiting.token_ids)) == ("abort", 0)
            await closing
            with pytest.raises(EngineError, match="closed") as refused:
                await engine.generate(request_of(prompt(4)))
            assert not isinstance(refused.value, EngineDied), "it was told to end"

    asyncio.run(play())


def test_an_engine_outlives_the_event_loop_of_a_caller(
    new_model: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    from agentrl.engine.torch_engine import TorchEngine

    engine = TorchEngine(new_model(), max_batch_size=2, max_model_len=1024)

    async def leave() -> None:
        for i in range(2):
            asyncio.ensure_future(engine.generate(request_of(prompt(4), seed=i, max_tokens=900)))  # noqa: RUF006
        await asyncio.sleep(0)

    async def come() -> int:
        result = await engine.generate(request_of(prompt(4), max_tokens=3))
        await engine.close()
        return len(result.token_ids)

    asyncio.run(leave())
    assert asyncio.run(come()) == 3


def test_models_that_the_engine_cannot_do_are_refused(new_model: Fixture) -> None:
    from agentrl.engine.torch_engine import TorchEngine

    with pytest.raises(EngineError, match="1024 positions"):
        TorchEngine(new_model(), max_batch_size=2, max_model_len=2048)
    model = new_model()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 32
    with pytest.raises(EngineError, match=r"window of 32 is shorter than rollout\.max_model_len 64"):
        TorchEngine(model, max_batch_size=2, max_model_len=64)
    with pytest.raises(EngineError, match=r"kv_cache_tokens is 63: .*max_model_len 64 does not fit"):
        TorchEngine(new_model(), max_batch_size=2, max_model_len=64, kv_cache_tokens=63)
