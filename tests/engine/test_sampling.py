"""Tokens are drawn from the model's distribution, by the request's seed and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.sampling import sample

Fixture = Callable[..., Any]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_is_what_transformers_generates(
    family: str, new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    model = new_model(family)
    lengths = [3, 30, 12]

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=2) as engine:
            return await asyncio.gather(
                *(engine.generate(request_of(prompt(n), seed=n, max_tokens=16, temperature=0)) for n in lengths)
            )

    for length, result in zip(lengths, asyncio.run(play()), strict=True):
        ids = torch.tensor([prompt(length)])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
        assert result.token_ids.tolist() == generated[0, length:].tolist()
        assert (result.logprobs == 0).all()


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    model = new_model()
    request = request_of(prompt(10), seed=7, max_tokens=20)

    async def alone() -> list[int]:
        async with start_engine(model, max_batch_size=8) as engine:
            return (await engine.generate(request)).token_ids.tolist()

    async def crowded(slots: int) -> list[int]:
        async with start_engine(model, max_batch_size=slots) as engine:
            others = [request_of(prompt(3 * i + 1), seed=100 + i, max_tokens=4 * i + 1) for i in range(9)]
            *_, mine = await asyncio.gather(*map(engine.generate, [*others, request]))
            return mine.token_ids.tolist()

    first = asyncio.run(alone())
    assert asyncio.run(alone()) == first
    assert asyncio.run(crowded(8)) == first
    assert asyncio.run(crowded(2)) == first


def test_different_seeds_differ(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    async def play() -> list[Any]:
        async with start_engine(new_model(), max_batch_size=8) as engine:
            return await asyncio.gather(
                *(engine.generate(request_of(prompt(10), seed=i, max_tokens=20)) for i in range(8))
            )

    assert len({tuple(result.token_ids.tolist()) for result in asyncio.run(play())}) == 8


def test_each_row_is_drawn_by_its_own_number() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3]] * 6))
    uniforms = torch.tensor([0.0, 0.499, 0.501, 0.699, 0.701, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(6), uniforms)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.5, 0.5, 0.2, 0.2, 0.3, 0.3], rtol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(1000, -1)
    uniforms = torch.linspace(0, 1 - 1e-12, 1000, dtype=torch.float64)
    tokens, _ = sample(logits, torch.ones(1000), uniforms)
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_log_prob_is_that_after_temperature(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, logprobs = sample(logits, torch.tensor([temperature]), torch.tensor([0.95], dtype=torch.float64))
    assert torch.equal(logprobs, torch.log_softmax(logits / temperature, -1)[0, tokens])


def test_temperatures_are_each_rows_own() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, -1)
    temperatures = torch.tensor([0.0, 1.0, 0.5])
    tokens, logprobs = sample(logits, temperatures, torch.full((3,), 0.95, dtype=torch.float64))
    assert tokens.tolist() == [0, 2, 1]
    assert logprobs[0] == 0
    np.testing.assert_allclose(logprobs[1], torch.log_softmax(logits[0], -1)[2], rtol=1e-6)
    np.testing.assert_allclose(logprobs[2], torch.log_softmax(2 * logits[0], -1)[1], rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_tokens_follow_the_models_distribution(
    temperature: float,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
) -> None:
    model, count = new_model(), 4000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt(6)])).logits[0, -1]
    expected = count * torch.softmax(logits / temperature, -1).numpy()

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=500) as engine:
            requests = [request_of(prompt(6), seed=i, max_tokens=1, temperature=temperature) for i in range(count)]
            return await asyncio.gather(*map(engine.generate, requests))

    drawn = np.bincount([int(result.token_ids[0]) for result in asyncio.run(play())], minlength=len(expected))
    often = expected >= 20
    observed = np.append(drawn[often], drawn[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
