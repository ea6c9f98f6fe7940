"""What an earlier prompt or turn began with is not computed again, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.weights.shm import ShmSender

Fixture = Callable[..., Any]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 50, 300])
def test_a_group_computes_its_prompt_once(
    family: str,
    length: int,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
) -> None:
    model = new_model(family)
    ids = prompt(length)

    async def play() -> None:
        async with start_engine(model, max_batch_size=3) as engine:
            requests = [request_of(ids, seed=i, max_tokens=5 + 3 * i) for i in range(8)]
            results = await asyncio.gather(*map(engine.generate, requests))
            # Each member but the first computes the prompt's last token, for the distribution of its own first one.
            assert (await engine.stats()).prompt_tokens == length + 7
            assert engine._batch.cached_tokens == 7 * (length - 1)
            for result in results:
                expected = reference_logprobs(model, ids, result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)
            later = await engine.generate(request_of(ids, seed=2, max_tokens=11))
            assert later.token_ids.tolist() == results[2].token_ids.tolist()
            assert (await engine.stats()).prompt_tokens == length + 8

    asyncio.run(play())


def test_turns_of_an_episode_compute_what_is_new(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model = new_model()

    async def play() -> None:
        async with start_engine(model, max_batch_size=2) as engine:
            ids, computed = prompt(40), 0
            for turn in range(5):
                result = await engine.generate(request_of(ids, seed=turn, max_tokens=13 + turn))
                expected = reference_logprobs(model, ids, result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)
                new = (await engine.stats()).prompt_tokens - computed
                computed += new
                if turn:
                    known = len(ids) - 9 - 1  # all of it but the tool's result and the last token sampled
                    assert len(ids) - known <= new < len(ids) - known + 16
                # Others come and go while the tool works.
                others = [request_of(prompt(30, 100 * turn + i), seed=i, max_tokens=4) for i in range(3)]
                await asyncio.gather(*map(engine.generate, others))
                computed += 90
                ids = [*ids, *result.token_ids.tolist(), *prompt(9, turn)]

    asyncio.run(play())


def test_prompts_that_begin_alike_share_the_beginning_even_in_one_step(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model, system = new_model(), prompt(64)
    prompts = [[*system, *prompt(10 + i, i)] for i in range(6)]

    async def play() -> None:
        async with start_engine(model, max_batch_size=8) as engine:
            requests = [request_of(ids, seed=i, max_tokens=6) for i, ids in enumerate(prompts)]
            results = await asyncio.gather(*map(engine.generate, requests))
            assert (await engine.stats()).prompt_tokens == 64 + sum(len(ids) - 64 for ids in prompts)
            for ids, result in zip(prompts, results, strict=True):
                expected = reference_logprobs(model, ids, result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)

    asyncio.run(play())


def test_the_same_tokens_at_another_place_are_not_reused(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model, block = new_model(), prompt(16)

    async def play() -> None:
        async with start_engine(model) as engine:
            for ids in ([*block, 5], [*prompt(16, 9), *block, 5], [*block, *block, 5], [7, *block, 5]):
                result = await engine.generate(request_of(ids, max_tokens=4))
                expected = reference_logprobs(model, ids, result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)
            assert engine._batch.cached_tokens == 16  # the third prompt's first block

    asyncio.run(play())


@pytest.mark.parametrize("running", [False, True])
def test_an_update_forgets_everything(
    running: bool,
    tmp_path: Path,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
    steps_of: Fixture,
) -> None:
    old, new, ids = new_model(seed=0), new_model(seed=1), prompt(40)

    async def play() -> None:
        async with start_engine(old, max_batch_size=4) as engine:
            await engine.generate(request_of(ids, seed=1, max_tokens=20))
            calls = []
            if running:
                steps = steps_of(engine)
                steps.hold_at(6)
                calls = [asyncio.create_task(engine.generate(request_of(ids, seed=i, max_tokens=30))) for i in range(4)]
                await asyncio.to_thread(steps.reached)
                pause = asyncio.create_task(engine.pause())
                await asyncio.sleep(0)
                steps.release()
                await pause
            await engine.pause()
            await engine.start_weight_update()
            await ShmSender(tmp_path, 5000).send(new.named_parameters(), engine.update_weights)
            await engine.finish_weight_update(1)
            assert engine._batch._prefixes.tokens == 0
            cached = engine._batch.cached_tokens
            await engine.resume()
            for result in await asyncio.gather(*calls):
                assert set(result.versions.tolist()) == {0, 1}
                for version, model in enumerate((old, new)):
                    own = result.versions == version
                    expected = reference_logprobs(model, ids, result.token_ids)
                    np.testing.assert_allclose(result.logprobs[own], expected[own], atol=5e-5)
            if running:  # the prompt that the four have in common is computed once under the new weights, too
                assert engine._batch.cached_tokens - cached == 3 * 32
            result = await engine.generate(request_of(ids, seed=1, max_tokens=20))
            async with start_engine(new) as fresh:
                expected = await fresh.generate(request_of(ids, seed=1, max_tokens=20))
            assert result.token_ids.tolist() == expected.token_ids.tolist()
            assert (result.versions == 1).all()
            np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=5e-5)

    asyncio.run(play())
