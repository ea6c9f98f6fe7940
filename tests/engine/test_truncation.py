"""top_k and top_p: sampling among the most likely tokens, with the log-probs of what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.sampling import sample, truncated

Fixture = Callable[..., Any]

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.89}, {1, 2, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),  # 0.4 of 0.9 is 0.44: not yet half of what top_k leaves
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 of 0.7 is 0.57
    ],
)
def test_the_most_likely_tokens_are_kept(cut: dict[str, Any], kept: set[int], request_of: Fixture) -> None:
    logits = truncated(LOGITS[None], [request_of([1], **cut)])[0]
    assert set(torch.isfinite(logits).nonzero()[:, 0].tolist()) == kept
    assert all(logits[token] == LOGITS[token] for token in kept)


def test_of_equal_tokens_the_lower_ids_are_kept(request_of: Fixture) -> None:
    logits = truncated(torch.zeros(1, 300), [request_of([1], top_k=7)])[0]
    assert torch.isfinite(logits).nonzero()[:, 0].tolist() == list(range(7))


def test_rows_are_cut_each_by_its_own_request(request_of: Fixture) -> None:
    requests = [request_of([1]), request_of([1], top_k=1), request_of([1], top_p=0.6), request_of([1], temperature=0)]
    tokens, logprobs = sample(LOGITS.expand(4, -1), requests, [0.05, 0.99, 0.99, 0.99])
    assert tokens.tolist() == [0, 1, 3, 1]
    np.testing.assert_allclose(logprobs.exp(), [0.1, 1.0, 0.3 / 0.7, 1.0], rtol=1e-5)


def test_temperature_comes_before_the_cut(request_of: Fixture) -> None:
    flat = request_of([1], temperature=100.0, top_p=0.6)
    tokens, _ = sample(LOGITS.expand(100, -1), [flat] * 100, (np.arange(100) / 100).tolist())
    assert set(tokens.tolist()) == {1, 2, 3}


def test_sampled_tokens_follow_the_truncated_distribution(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    model, count = new_model(), 2000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt(6)])).logits[0, -1]
    expected = torch.softmax(logits, -1)
    kept = expected.argsort(descending=True)[:8]
    expected = (expected[kept] / expected[kept].sum()).numpy()

    async def play() -> list[Any]:
        async with start_engine(model, max_batch_size=250) as engine:
            requests = [request_of(prompt(6), seed=i, max_tokens=1, top_k=8) for i in range(count)]
            return await asyncio.gather(*map(engine.generate, requests))

    results = asyncio.run(play())
    places = {int(token): place for place, token in enumerate(kept)}
    drawn = [places[int(result.token_ids[0])] for result in results]
    np.testing.assert_allclose([np.exp(result.logprobs[0]) for result in results], expected[drawn], rtol=1e-4)
    wanted = count * expected
    chi_square = ((np.bincount(drawn, minlength=8) - wanted) ** 2 / wanted).sum()
    assert chi_square < 7 + 4 * 14**0.5
