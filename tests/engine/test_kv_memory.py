"""Keys and values stay within their bound, whatever has to give way for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.device import Device
from agentrl.engine.kv_cache import KVCache, default_tokens
from agentrl.engine.prefix_cache import PrefixCache

Fixture = Callable[..., Any]


def filled_cache(rows: int = 2, length: int = 128) -> KVCache:
    """One layer; the key of row r at position p is r * 1000 + p, the value its negative."""
    cache = KVCache(rows, length, rows * length)
    row, position = (
        index.flatten() for index in torch.meshgrid(torch.arange(rows), torch.arange(length), indexing="ij")
    )
    keys = (row * 1000 + position).float()[:, None, None].expand(-1, 2, 4)
    cache.write(0, keys, -keys, row, position)
    return cache


def test_the_cache_grows_to_the_longest_sequence_and_gives_up_rows_for_it() -> None:
    cache = KVCache(8, 1024, 2048)
    assert (cache.rows, cache.length) == (8, 256)
    assert cache.fits(8, 256) and not cache.fits(9, 16) and not cache.fits(8, 257)
    cache.write(0, torch.ones(3, 2, 4), torch.ones(3, 2, 4), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 255]))
    cache.reserve(3, 300)
    assert cache.length >= 300 and cache.tokens <= 2048 and cache.rows >= 3
    keys, values = cache.read(2, 255, 256)
    assert (keys == 1).all() and (values == 1).all()
    cache.reserve(2, 1024)
    assert (cache.rows, cache.length) == (2, 1024)
    assert not cache.fits(3, 10)


def test_what_was_read_can_be_loaded_into_another_row() -> None:
    cache = filled_cache()
    cache.load(0, *cache.read(1, 0, 50))
    keys, values = cache.read(0, 0, 60)
    assert keys[0, 0, :, 0].tolist() == [*range(1000, 1050), *range(50, 60)]
    assert torch.equal(values, -keys)


def test_a_row_moves_over_another() -> None:
    cache = filled_cache(3)
    cache.move(2, 1, 5)
    assert cache.read(1, 0, 7)[0][0, 1, :, 3].tolist() == [*range(2000, 2005), 1005, 1006]
    assert cache.read(2, 0, 7)[0][0, 1, :, 3].tolist() == [*range(2000, 2007)]


def test_the_longest_unused_blocks_go_first_and_children_before_their_parents() -> None:
    prefixes, cache = PrefixCache(), filled_cache(1)
    prefixes.limit(96)
    old, new = list(range(48)), list(range(100, 148))
    prefixes.store(old, cache, 0)
    prefixes.store(new, cache, 0)
    assert prefixes.tokens == 96
    assert prefixes.match(old[:16]).tokens == 16  # used again: goes last
    prefixes.store([*range(200, 216)], cache, 0)
    assert prefixes.tokens == 96
    assert [prefixes.match(ids).tokens for ids in (old, new)] == [32, 48]
    prefixes.limit(40)
    assert prefixes.tokens <= 40
    assert prefixes.match(new).tokens == 32
    prefixes.limit(0)
    assert prefixes.tokens == 0
    assert prefixes.match(new).tokens == 0


def test_blocks_hold_the_keys_of_their_positions_and_only_whole_matches_count() -> None:
    prefixes, cache = PrefixCache(), filled_cache(1)
    prefixes.limit(1000)
    ids = list(range(40))
    prefixes.store(ids[:20], cache, 0)
    prefixes.store(ids, cache, 0)
    assert prefixes.tokens == 20 + 24
    match = prefixes.match(ids)
    assert [block.tokens for block in match.blocks] == [16, 16, 8] and match.missing is None
    assert torch.cat([block.keys for block in match.blocks], 2)[0, 0, :, 0].tolist() == list(range(40))
    assert prefixes.match(ids[:20]).tokens == 20
    assert prefixes.match(ids[:19]).tokens == 16
    assert prefixes.match([*ids[:15], 99]).tokens == 0


@pytest.mark.parametrize("kv_cache_tokens", [200, 256, 410, 1000])
def test_sequences_that_outgrow_the_bound_step_back_and_lose_nothing(
    kv_cache_tokens: int,
    new_model: Fixture,
    start_engine: Fixture,
    request_of: Fixture,
    prompt: Fixture,
    reference_logprobs: Fixture,
) -> None:
    model = new_model()
    requests = [request_of(prompt(5 + 7 * i), seed=i, max_tokens=150 - 9 * i) for i in range(6)]

    async def play(**options: Any) -> tuple[list[Any], int]:
        async with start_engine(model, max_batch_size=4, max_model_len=200, **options) as engine:
            batch, most = engine._batch, 0
            step = batch.step

            def watched(version: int) -> None:
                nonlocal most
                step(version)
                most = max(most, batch.kv_tokens)

            batch.step = watched
            results = await asyncio.gather(*map(engine.generate, requests))
            return results, most

    bounded, most = asyncio.run(play(kv_cache_tokens=kv_cache_tokens))
    assert most <= kv_cache_tokens
    free, _ = asyncio.run(play())
    for request, result, expected in zip(requests, bounded, free, strict=True):
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        reference = reference_logprobs(model, request.token_ids.tolist(), result.token_ids)
        np.testing.assert_allclose(result.logprobs, reference, atol=5e-5)


def test_blocks_for_reuse_make_room_before_the_rectangle_grows(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bound = new_model(), 1024

    async def play() -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        async with start_engine(model, max_batch_size=2, max_model_len=512, kv_cache_tokens=bound) as engine:
            resized = KVCache._resized

            def watched(cache: KVCache, tensor: torch.Tensor) -> torch.Tensor:
                sizes.append((engine._batch._prefixes.tokens, cache.tokens))
                return resized(cache, tensor)

            monkeypatch.setattr(KVCache, "_resized", watched)
            for number in range(3):
                await engine.generate(request_of(prompt(180, number), seed=number, max_tokens=4))
            assert engine._batch._prefixes.tokens > 450 and not sizes
            await engine.generate(request_of(prompt(300), max_tokens=4))
        return sizes

    sizes = asyncio.run(play())
    assert sizes and max(blocks + rectangle for blocks, rectangle in sizes) <= bound


def test_eviction_under_pressure_changes_no_token(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture, reference_logprobs: Fixture
) -> None:
    model = new_model()

    async def play() -> None:
        async with start_engine(model, max_batch_size=2, max_model_len=128, kv_cache_tokens=2 * 128 + 150) as engine:
            for number in range(30):
                ids = prompt(60, number // 3 % 4)
                result = await engine.generate(request_of(ids, seed=number, max_tokens=10))
                expected = reference_logprobs(model, ids, result.token_ids)
                np.testing.assert_allclose(result.logprobs, expected, atol=5e-5)
                assert engine._batch._prefixes.tokens <= 150
            assert 30 * 60 > (await engine.stats()).prompt_tokens > 4 * 60

    asyncio.run(play())


def test_the_default_bound_is_twice_what_running_sequences_can_need(new_model: Fixture, start_engine: Fixture) -> None:
    async def play() -> None:
        async with start_engine(new_model(), max_batch_size=3, max_model_len=100) as engine:
            assert engine._batch._kv_cache_tokens == 600
            assert engine._batch._cache.tokens == 300

    asyncio.run(play())


def test_the_default_bound_fits_into_the_memory_of_the_models_own_device(
    new_model: Fixture, start_engine: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model()
    config = model.config
    nbytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    asked: list[int] = []

    async def bound(free_tokens: int) -> int:
        def free_memory(device: Device, index: int) -> int:
            asked.append(index)
            return int(free_tokens * nbytes / 0.4) + 1

        monkeypatch.setattr(Device, "free_memory", free_memory)
        async with start_engine(model, max_batch_size=3, max_model_len=100) as engine:
            return engine._batch._kv_cache_tokens

    with caplog.at_level("INFO", "agentrl.engine.kv_cache"):
        assert [asyncio.run(bound(tokens)) for tokens in (10_000, 450, 30)] == [600, 450, 100]
    assert "kv_cache_tokens is 450: 3 sequences of 100 tokens need 300 for themselves and as many" in caplog.text
    assert "free on cpu hold 450" in caplog.text
    place = SimpleNamespace(config=config, dtype=model.dtype, device=torch.device("cpu", 3))
    default_tokens(place, 3, 100)
    assert asked == [0, 0, 0, 3]


def test_a_beginning_stays_longer_than_what_was_added_to_it() -> None:
    prefixes, cache = PrefixCache(), filled_cache(1)
    prefixes.limit(200)
    ids = list(range(96))
    for length in (32, 64, 96):  # turn by turn
        prefixes.store(ids[:length], cache, 0)
    prefixes.limit(48)
    assert prefixes.tokens == prefixes.match(ids).tokens == 48
