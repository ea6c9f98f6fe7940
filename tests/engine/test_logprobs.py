"""What the engine reports is the distribution it sampled from: that of transformers' own forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Fixture = Callable[..., Any]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("slots", [3, 16])
def test_the_ratio_of_the_policy_with_itself_is_one(
    family: str,
    temperature: float,
    slots: int,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
) -> None:
    model = new_model(family)
    lengths = [1, 2, 40, 7, 19, 3, 64, 11]
    limits = [9, 1, 30, 4, 17, 25, 2, 12]

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=slots) as engine:
            return await asyncio.gather(
                *(
                    engine.generate(request_of(prompt(n), seed=i, max_tokens=limit, temperature=temperature))
                    for i, (n, limit) in enumerate(zip(lengths, limits, strict=True))
                )
            )

    for length, limit, result in zip(lengths, limits, asyncio.run(play()), strict=True):
        assert len(result.token_ids) == limit and result.finish_reason == "length"
        expected = reference_logprobs(model, prompt(length), result.token_ids, temperature)
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)
        np.testing.assert_allclose(np.exp(expected - result.logprobs), 1.0, atol=2e-5)
        assert (result.versions == 0).all()


def test_prompts_and_answers_longer_than_the_first_cache(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model = new_model("qwen3")
    lengths = [5, 250, 600, 30]

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=2) as engine:
            return await asyncio.gather(
                *(engine.generate(request_of(prompt(n), seed=n, max_tokens=20)) for n in lengths)
            )

    for length, result in zip(lengths, asyncio.run(play()), strict=True):
        expected = reference_logprobs(model, prompt(length), result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)


def test_long_prompts_are_admitted_over_several_steps(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model = new_model("llama")

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=8) as engine:  # 8 * 700 tokens: more than one prefill holds
            return await asyncio.gather(
                *(engine.generate(request_of(prompt(700, i), seed=i, max_tokens=3)) for i in range(8))
            )

    for number, result in enumerate(asyncio.run(play())):
        expected = reference_logprobs(model, prompt(700, number), result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)
