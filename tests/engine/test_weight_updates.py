"""New weights arrive in the middle of answers: nothing is lost, and no token comes from a mixture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.record import EngineError, WeightTransferError
from agentrl.record.protocols import Bucket
from agentrl.weights.segment import Segment
from agentrl.weights.shm import ShmSender

Fixture = Callable[..., Any]


async def publish(engine: Any, model: Any, version: int, folder: Path) -> None:
    """What the trainer and the publish coordinator do: pause, send, finish, resume."""
    await engine.pause()
    await engine.start_weight_update()
    await ShmSender(folder, bucket_bytes=5000).send(model.named_parameters(), engine.update_weights)
    await engine.finish_weight_update(version)
    await engine.resume()


async def at_step(steps: Any, engine: Any, action: Any) -> None:
    """Runs `action` after the step that is held: it starts with a pause, which is handed over first."""
    await asyncio.to_thread(steps.reached)
    task = asyncio.create_task(action)
    await asyncio.sleep(0)
    steps.release()
    await task


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("slots", [2, 8])
def test_each_token_is_of_the_version_it_says_given_the_whole_prefix(
    family: str,
    slots: int,
    tmp_path: Path,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
    steps_of: Fixture,
) -> None:
    models = [new_model(family, seed=seed) for seed in range(3)]
    requests = [request_of(prompt(3 + 2 * i, i), seed=i, max_tokens=14 + i) for i in range(5)]

    async def play() -> list[Any]:
        async with start_engine(models[0], max_batch_size=slots) as engine:
            steps = steps_of(engine)
            steps.hold_at(4)
            calls = [asyncio.create_task(engine.generate(request)) for request in requests]
            await at_step(steps, engine, publish(engine, models[1], 2, tmp_path))
            steps.hold_at(9)
            await at_step(steps, engine, publish(engine, models[2], 6, tmp_path))
            return await asyncio.gather(*calls)

    results = asyncio.run(play())
    by_version = {0: models[0], 2: models[1], 6: models[2]}
    assert {version for result in results for version in result.versions.tolist()} == {0, 2, 6}
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length" and len(result.token_ids) == request.max_tokens
        assert (np.diff(result.versions) >= 0).all()
        for version, model in by_version.items():
            own = result.versions == version
            expected = reference_logprobs(model, request.token_ids.tolist(), result.token_ids.tolist())
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=2e-5)
    if slots == 8:
        assert results[0].versions.tolist() == [0] * 4 + [2] * 5 + [6] * 5


def test_the_same_prompt_is_answered_by_the_new_weights_not_from_the_old_cache(
    tmp_path: Path, new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    old, new = new_model(seed=0), new_model(seed=1)
    request = request_of(prompt(20), max_tokens=10, temperature=0)

    async def answer(model: Any) -> list[int]:
        async with start_engine(model) as engine:
            return (await engine.generate(request)).token_ids.tolist()

    async def play() -> tuple[list[int], list[int]]:
        async with start_engine(old) as engine:
            first = await engine.generate(request)
            await publish(engine, new, 1, tmp_path)
            second = await engine.generate(replace(request, min_version=1))
            assert second.versions.tolist() == [1] * 10
            assert (await engine.stats()).version == 1
            return first.token_ids.tolist(), second.token_ids.tolist()

    assert asyncio.run(play()) == (asyncio.run(answer(old)), asyncio.run(answer(new)))


def test_an_engine_that_slept_goes_on_after_an_update(
    tmp_path: Path,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
) -> None:
    new = new_model(seed=1)

    async def play() -> tuple[Any, Any]:
        async with start_engine(new_model(seed=0)) as engine:
            running = asyncio.create_task(engine.generate(request_of(prompt(20), max_tokens=200)))
            await engine.generate(request_of(prompt(20), max_tokens=5, request_id="beside it"))
            await engine.sleep()
            cut = await running
            waiting = asyncio.create_task(engine.generate(request_of(prompt(20), max_tokens=10, request_id="next")))
            await engine.wake()
            assert not waiting.done() and (await engine.stats()).running == 0
            await publish(engine, new, 1, tmp_path)
            return cut, await waiting

    cut, answer = asyncio.run(play())
    assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 200
    assert answer.versions.tolist() == [1] * 10
    expected = reference_logprobs(new, request_of(prompt(20)).token_ids.tolist(), answer.token_ids.tolist())
    np.testing.assert_allclose(answer.logprobs, expected, atol=2e-5)


def test_an_update_without_a_pause_or_a_start_is_refused(
    tmp_path: Path, new_model: Fixture, start_engine: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            with pytest.raises(EngineError, match="pause the engine"):
                await engine.start_weight_update()
            await engine.pause()
            with pytest.raises(EngineError, match="start_weight_update"):
                await ShmSender(tmp_path, 5000).send(new_model().named_parameters(), engine.update_weights)
            with pytest.raises(EngineError, match="start_weight_update"):
                await engine.finish_weight_update(1)
            assert (await engine.stats()).version == 0

    asyncio.run(play())


def test_a_wrong_checksum_is_a_typed_error_and_the_update_can_be_made_again(
    tmp_path: Path,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
) -> None:
    new = new_model(seed=1)

    async def play() -> None:
        async with start_engine(new_model()) as engine:

            async def deliver_damaged(bucket: Bucket) -> None:
                Segment.attach(bucket.segment).tensor[bucket.nbytes - 1] ^= 1
                await engine.update_weights(bucket)

            await engine.pause()
            await engine.start_weight_update()
            with pytest.raises(WeightTransferError, match="bucket 0: checksum"):
                await ShmSender(tmp_path, 5000).send(new.named_parameters(), deliver_damaged)
            assert (await engine.stats()).version == 0
            await publish(engine, new, 1, tmp_path)
            result = await engine.generate(request_of(prompt(5)))
            expected = reference_logprobs(new, prompt(5), result.token_ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)

    asyncio.run(play())


def test_an_incomplete_update_is_not_put_into_service(
    tmp_path: Path, new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            await engine.pause()
            await engine.start_weight_update()
            some = [(name, tensor) for name, tensor in new_model().named_parameters() if "norm" not in name]
            await ShmSender(tmp_path, 5000).send(some, engine.update_weights)
            with pytest.raises(WeightTransferError, match=r"did not arrive whole: .*norm"):
                await engine.finish_weight_update(1)
            await engine.resume()
            call = asyncio.create_task(engine.generate(request_of(prompt(4))))
            stats = await engine.stats()
            await engine.abort([])
            assert (await engine.stats()).generated_tokens == stats.generated_tokens == 0  # a mixture never answers
            assert stats.version == 0
            call.cancel()

    asyncio.run(play())


def test_an_update_of_an_idle_engine_waits_for_nothing(
    tmp_path: Path, new_model: Fixture, start_engine: Fixture
) -> None:
    async def play() -> None:
        async with start_engine(new_model()) as engine:
            for version in (1, 2, 5):
                await asyncio.wait_for(publish(engine, new_model(seed=version), version, tmp_path), timeout=10)
            assert (await engine.stats()).version == 5

    asyncio.run(play())


def test_a_pause_within_a_pause_does_not_wait_for_what_is_frozen(
    tmp_path: Path, new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    """After a failed update an engine is still paused, and requests that came meanwhile can't end."""

    async def play() -> Any:
        async with start_engine(new_model()) as engine:
            running = asyncio.create_task(engine.generate(request_of(prompt(4), seed=1, max_tokens=40)))
            await asyncio.sleep(0)
            await engine.pause("wait")
            assert len((await asyncio.wait_for(running, 5)).token_ids) == 40
            late = asyncio.create_task(engine.generate(request_of(prompt(4), seed=2)))
            await asyncio.sleep(0)
            await engine.stats()
            await asyncio.wait_for(engine.pause("wait"), 5)
            await asyncio.sleep(0.05)
            assert not late.done()
            await engine.resume()
            return await late

    assert len(asyncio.run(play()).token_ids) == 8
