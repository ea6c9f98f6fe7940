"""What vLLM samples is what the record says: tokens, log-probs, versions, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from agentrl.record import EngineError
from agentrl.tiny import tiny_model_path
from tests.vllm.conftest import Background, expected_logprobs, prompt, request_of, until_sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    engine: Any, publish: Any, weights: list[Any], background: Background, temperature: float
) -> None:
    async def play() -> list[Any]:
        await publish(engine, weights[0])
        requests = [request_of(prompt(3 + 7 * i, i), i, temperature=temperature, max_tokens=20) for i in range(6)]
        return [(r, a) for r, a in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True)]

    for request, result in background.run(play()):
        assert len(result.token_ids) == 20 and result.finish_reason == "length"
        expected = expected_logprobs(weights[0], request.token_ids.tolist(), result.token_ids.tolist(), temperature)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_seeds_decide_and_differ(engine: Any, background: Background) -> None:
    async def play(seeds: list[int]) -> list[list[int]]:
        requests = [request_of(prompt(9), i, seed=seed, max_tokens=30) for i, seed in enumerate(seeds)]
        return [result.token_ids.tolist() for result in await asyncio.gather(*map(engine.generate, requests))]

    largest = 2**63 - 1
    first = background.run(play([1, 2, 3, largest]))
    assert background.run(play([1, 2, 3, largest])) == first
    assert len({tuple(ids) for ids in first}) == 4


def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine: Any, background: Background) -> None:
    free = background.run(engine.generate(request_of(prompt(5), seed=4, max_tokens=30)))
    stop = int(free.token_ids[10])
    first = free.token_ids.tolist().index(stop)
    result = background.run(engine.generate(request_of(prompt(5), seed=4, max_tokens=30, stop_token_ids=(stop,))))
    assert result.finish_reason == "stop"
    assert result.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    assert len(result.logprobs) == len(result.versions) == first + 1


def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(engine: Any, background: Background) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model_path())
    free = background.run(engine.generate(request_of(prompt(5), seed=5, max_tokens=40)))
    text = tokenizer.decode(free.token_ids[12:15].tolist(), clean_up_tokenization_spaces=False)
    result = background.run(engine.generate(request_of(prompt(5), seed=5, max_tokens=40, stop=(text,))))
    assert result.finish_reason == "stop"
    count = len(result.token_ids)
    assert count <= 15 and result.token_ids.tolist() == free.token_ids.tolist()[:count]
    assert text in tokenizer.decode(result.token_ids.tolist(), clean_up_tokenization_spaces=False)
    assert text not in tokenizer.decode(result.token_ids.tolist()[:-1], clean_up_tokenization_spaces=False)
    assert len(result.logprobs) == len(result.versions) == count


def test_an_aborted_request_returns_what_there_is(engine: Any, background: Background) -> None:
    async def play() -> Any:
        await engine.pause()
        calls = [asyncio.create_task(engine.generate(request_of(prompt(5), i, max_tokens=900))) for i in (70, 71)]
        await engine.resume()
        await until_sampling(engine, calls[0])
        await engine.abort(["r70"])
        result = await calls[0]
        calls[1].cancel()  # the agent was cancelled: nothing of it may go on
        await asyncio.wait([calls[1]])
        for _ in range(50):
            if (await engine.stats()).running == 0:
                break
            await asyncio.sleep(0.1)
            await engine.generate(request_of(prompt(4), 72, max_tokens=1))
        return result, await engine.stats()

    result, stats = background.run(play())
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 900
    assert len(result.logprobs) == len(result.versions) == len(result.token_ids)
    assert stats.running == stats.waiting == 0


def test_truncation_and_greedy_are_there_for_validation(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    background.run(publish(engine, weights[0]))
    greedy = background.run(engine.generate(request_of(prompt(8), temperature=0.0, max_tokens=10)))
    top_one = background.run(engine.generate(request_of(prompt(8), top_k=1, max_tokens=10)))
    assert greedy.token_ids.tolist() == top_one.token_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.arange(1000, dtype=np.int32), "max_tokens": 100}, "max_model_len 1024"),
        ({"token_ids": np.zeros(0, np.int32)}, "prompt of 0"),
        ({"token_ids": np.array([5000], np.int32)}, "token ids from 5000"),
        ({"max_tokens": 0}, "at least one token"),
        ({"temperature": -1.0}, "temperature"),
        ({"min_version": 10**6}, "asked for version"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(
    engine: Any, background: Background, changes: dict, message: str
) -> None:
    async def play() -> Any:
        good = asyncio.create_task(engine.generate(request_of(prompt(6), 80, max_tokens=5)))
        with pytest.raises(EngineError, match=message):
            await engine.generate(request_of(prompt(6), 81, **changes))
        return await good

    assert len(background.run(play()).token_ids) == 5


def test_counters_count(engine: Any, background: Background) -> None:
    before = background.run(engine.stats())
    background.run(engine.generate(request_of(prompt(40, 9), 90, max_tokens=25)))
    after = background.run(engine.stats())
    assert after.generated_tokens - before.generated_tokens == 25
    assert after.busy_seconds > before.busy_seconds and after.workers == 1
