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
Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def draw(request_of: Fixture) -> Draw:
    """`draw(logits, uniforms, temperatures)`: `sample` with requests that differ in temperature alone."""

    def sample_rows(
        logits: torch.Tensor, uniforms: list[float], temperatures: list[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits, [request_of([1], temperature=temperature) for temperature in temperatures], uniforms)

    return sample_rows


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


def test_each_row_is_drawn_by_its_own_number(draw: Draw) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3]] * 6))
    tokens, logprobs = draw(logits, [0.0, 0.499, 0.501, 0.699, 0.701, 1 - 2**-53], [1.0] * 6)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.5, 0.5, 0.2, 0.2, 0.3, 0.3], rtol=1e-5)


@pytest.mark.parametrize("size", [5, 128, 129, 1000])
def test_a_token_of_probability_zero_is_never_drawn(size: int, draw: Draw) -> None:
    possible = {1, 3, size - 2}
    logits = torch.full((size,), -torch.inf)
    logits[list(possible)] = torch.tensor([0.3, -2.0, 1.0])[: len(possible)]
    uniforms = torch.linspace(0, 1 - 1e-12, 1000, dtype=torch.float64).tolist()
    tokens, _ = draw(logits.expand(1000, -1), uniforms, [1.0] * 1000)
    assert set(tokens.tolist()) == possible


@pytest.mark.parametrize("size", [97, 1024, 50000])
def test_numbers_and_tokens_correspond_as_in_the_cumulative_distribution(size: int, draw: Draw) -> None:
    count = 400
    logits = 3 * torch.randn(count, size, generator=torch.Generator().manual_seed(size))
    uniforms = np.random.default_rng(size).random(count)
    tokens, logprobs = draw(logits, uniforms.tolist(), [1.0] * count)
    exact = torch.softmax(logits.double(), -1)
    upper = exact.cumsum(-1).gather(-1, tokens[:, None])[:, 0].numpy()
    lower = upper - exact.gather(-1, tokens[:, None])[:, 0].numpy()
    assert (lower - 1e-6 <= uniforms).all() and (uniforms <= upper + 1e-6).all()
    np.testing.assert_allclose(logprobs, exact.log().gather(-1, tokens[:, None])[:, 0], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_log_prob_is_that_after_temperature(temperature: float, draw: Draw) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, logprobs = draw(logits, [0.95], [temperature])
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits / temperature, -1)[0, tokens], atol=1e-6)


def test_temperatures_are_each_rows_own(draw: Draw) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, -1)
    tokens, logprobs = draw(logits, [0.95] * 3, [0.0, 1.0, 0.5])
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
