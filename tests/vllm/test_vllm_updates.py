"""New weights in a running vLLM: nothing is lost or restarted, and no token comes from a mixture or an old cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from agentrl.engine.vllm_local import reports_versions
from agentrl.record import EngineError, WeightTransferError
from agentrl.record.protocols import Bucket, WeightReceivers
from agentrl.tiny import tiny_model_path
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import CollectiveSender
from agentrl.weights.disk import DiskSender
from agentrl.weights.segment import Segment
from agentrl.weights.shm import ShmSender
from tests.vllm.conftest import Background, expected_logprobs, prompt, request_of, until_sampling


def test_fifty_updates_under_running_requests(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    """Every token has the log-prob that the model of its version gives it, after all the tokens before it."""

    async def play() -> tuple[list[Any], list[Any], dict[int, int], list[Any]]:
        model_of = {await publish(engine, weights[0]): 0}
        requests = [request_of(prompt(10 + i, i), 100 + i, max_tokens=600) for i in range(8)]
        calls = [asyncio.create_task(engine.generate(request)) for request in requests]
        checksums: dict[int, Any] = {}
        for number in range(50):
            await asyncio.sleep(0.02)
            which = number % 3 + 1
            model_of[await publish(engine, weights[which])] = which
            found = await engine.weight_checksums()
            assert checksums.setdefault(which, found) == found
        assert len({str(found) for found in checksums.values()}) == 3
        return requests, await asyncio.gather(*calls), model_of, [call.done() for call in calls]

    requests, results, model_of, _ = background.run(play())
    seen = set()
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length" and len(result.token_ids) == 600
        assert (np.diff(result.versions) >= 0).all()
        seen |= set(result.versions.tolist())
        expected = {
            which: expected_logprobs(weights[which], request.token_ids.tolist(), result.token_ids.tolist())
            for which in set(model_of.values())
        }
        for version in set(result.versions.tolist()):
            own = result.versions == version
            np.testing.assert_allclose(result.logprobs[own], expected[model_of[version]][own], atol=2e-3)
    assert len(seen) > 10, "updates have to come in the middle of the answers"


def test_requests_that_wait_for_their_turn_outlast_any_number_of_updates(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    """More than run at once, coming at any moment, also within updates: all end whole, each token of its version."""
    requests = [request_of(prompt(8 + i, i), 900 + i, max_tokens=60) for i in range(60)]

    async def arrive(request: Any) -> Any:
        await asyncio.sleep(request.seed % 30 * 0.03)
        return await engine.generate(request)

    async def play() -> tuple[list[Any], dict[int, int]]:
        model_of = {await publish(engine, weights[1]): 1}
        calls = [asyncio.create_task(arrive(request)) for request in requests]
        for number in range(25):
            await asyncio.sleep(0.01)
            model_of[await publish(engine, weights[number % 3 + 1])] = number % 3 + 1
        return await asyncio.gather(*calls), model_of

    results, model_of = background.run(play())
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length" and (np.diff(result.versions) >= 0).all()
        for version in set(result.versions.tolist()):
            own = result.versions == version
            expected = expected_logprobs(
                weights[model_of[version]], request.token_ids.tolist(), result.token_ids.tolist()
            )
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=2e-3)
    assert len({version for result in results for version in result.versions.tolist()}) > 5


def test_random_numbers_do_not_begin_anew_after_an_update(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    """Under weights that find all tokens equally likely they alone decide."""
    flat = deepcopy(weights[0])
    flat.model.norm.weight.zero_()

    async def play() -> Any:
        await publish(engine, flat)
        call = asyncio.create_task(engine.generate(request_of(prompt(5), 970, max_tokens=600)))
        for _ in range(2):
            await until_sampling(engine, call)
            await asyncio.sleep(0.05)  # for a few of them to come before the update
            await publish(engine, flat)
        return await call

    result = background.run(play())
    later = np.flatnonzero(np.diff(result.versions)) + 1
    assert len(later), "an update has to come in the middle of the answer"
    for begin in (*later, *(later - 1), *(later + 1)):
        assert (result.token_ids[begin : begin + 20] == result.token_ids[:20]).sum() < 3


def test_stop_texts_are_found_over_updates(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model_path())
    request = request_of(prompt(5), 980, temperature=0.0, max_tokens=500)

    async def play() -> tuple[Any, Any]:
        await publish(engine, weights[2])
        free = await engine.generate(request)
        text = tokenizer.decode(free.token_ids.tolist(), clean_up_tokenization_spaces=False)
        stop = next(text[i : i + 12] for i in range(len(text) - 20, 0, -1) if text.find(text[i : i + 12]) == i)
        call = asyncio.create_task(engine.generate(replace(request, stop=(stop,))))
        while not call.done():
            await asyncio.sleep(0.05)
            await publish(engine, weights[2])
        return stop, await call

    stop, result = background.run(play())
    assert result.finish_reason == "stop" and len(set(result.versions.tolist())) > 1
    ids = result.token_ids.tolist()
    assert stop in tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert stop not in tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)


def test_an_answer_can_be_ended_within_a_pause(engine: Any, weights: list[Any], background: Background) -> None:
    async def play() -> Any:
        call = asyncio.create_task(engine.generate(request_of(prompt(5), 990, max_tokens=900)))
        await until_sampling(engine, call)
        await engine.pause()
        await engine.abort(["r990"])
        result = await asyncio.wait_for(call, 2)
        await engine.resume()
        return result

    result = background.run(play())
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) == len(result.versions) < 900


def test_the_same_prompt_is_answered_by_the_new_weights_not_from_the_prefix_cache(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    request = request_of(prompt(200), 200, temperature=0.0, max_tokens=16)

    async def play() -> tuple[Any, Any, Any, int]:
        await publish(engine, weights[0])
        first = await engine.generate(request)
        before = await engine.stats()
        again = await engine.generate(replace(request, request_id="r201"))
        cached = (await engine.stats()).cached_tokens - before.cached_tokens
        await publish(engine, weights[1])
        return first, again, await engine.generate(replace(request, request_id="r202")), cached

    first, again, second, cached = background.run(play())
    assert cached >= 100, "there is a cache to be wrong with"
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert first.token_ids.tolist() != second.token_ids.tolist()
    for model, result in ((weights[0], first), (weights[1], second)):
        expected = expected_logprobs(model, request.token_ids.tolist(), result.token_ids.tolist())
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_kept_caches_are_gone_on_from_and_versions_stay_exact(
    start: Callable[..., Any], publish: Any, weights: list[Any], background: Background
) -> None:
    if not reports_versions():
        with pytest.raises(EngineError, match=r"set it to recompute, or install vLLM 0\.32 or newer"):
            start("rollout.kv_on_update=keep")
        return
    engine = start("rollout.kv_on_update=keep")

    async def play() -> tuple[Any, Any, int]:
        await publish(engine, weights[0])
        request = request_of(prompt(100), 300, max_tokens=800)
        call = asyncio.create_task(engine.generate(request))
        await until_sampling(engine, call)
        before = (await engine.stats()).prompt_tokens
        await publish(engine, weights[1])
        return request, await call, (await engine.stats()).prompt_tokens - before

    try:
        request, result, recomputed = background.run(play())
    finally:
        background.run(engine.close())
    versions = result.versions
    assert len(set(versions.tolist())) == 2 and (np.diff(versions) >= 0).all()
    old, new = (versions == version for version in sorted(set(versions.tolist())))
    expected = [expected_logprobs(weights[i], request.token_ids.tolist(), result.token_ids.tolist()) for i in (0, 1)]
    np.testing.assert_allclose(result.logprobs[old], expected[0][old], atol=1e-3)
    assert np.abs(result.logprobs[new] - expected[1][new]).max() > 0.01, "the old keys are still in use"
    assert recomputed == 0


async def _update(engine: Any, tensors: list[Any], deliver: Any, folder: Path, version: int) -> None:
    await engine.pause()
    await engine.start_weight_update()
    await ShmSender(folder, 200_000).send(tensors, deliver)
    await engine.finish_weight_update(version)


@pytest.mark.parametrize("fault", ["damaged", "missing", "unexpected", "shape", "half"])
def test_a_failed_update_is_a_typed_error_and_the_next_one_is_whole(
    fault: str, engine: Any, publish: Any, weights: list[Any], background: Background, tmp_path: Path
) -> None:
    tensors = list(weights[2].named_parameters())
    message = {
        "damaged": "checksum",
        "missing": "did not arrive whole: model.layers.1.self_attn.k_proj.weight",
        "unexpected": "model.layers.9",
        "shape": "model.layers.0.mlp.up_proj.weight",
        "half": "came where bucket",
    }[fault]
    if fault == "missing":
        tensors = [(name, tensor) for name, tensor in tensors if name != "model.layers.1.self_attn.k_proj.weight"]
    elif fault == "unexpected":
        tensors.insert(5, ("model.layers.9.mlp.up_proj.weight", weights[2].model.layers[0].mlp.up_proj.weight))
    elif fault == "shape":
        tensors = [(name, t[:7] if name == "model.layers.0.mlp.up_proj.weight" else t) for name, t in tensors]

    async def deliver(bucket: Bucket) -> None:
        if fault == "damaged" and bucket.index == 3:
            Segment.attach(bucket.segment).tensor[1000] ^= 1
        if fault != "half" or bucket.index != 3:
            await engine.update_weights(bucket)

    async def play() -> Any:
        version = await publish(engine, weights[0])
        with pytest.raises(WeightTransferError, match=message):
            await _update(engine, tensors, deliver, tmp_path, version + 1)
        with pytest.raises(EngineError, match="mixture"):
            await engine.resume()
        waiting = asyncio.create_task(engine.generate(request_of(prompt(30), 400)))
        await asyncio.sleep(0.2)
        assert not waiting.done() and (await engine.stats()).version == version
        await publish(engine, weights[1])
        return await waiting

    result = background.run(play())
    expected = expected_logprobs(weights[1], prompt(30), result.token_ids.tolist())
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_the_other_transports_bring_the_same_weights(
    transport: str, engine: Any, publish: Any, weights: list[Any], background: Background, tmp_path: Path
) -> None:
    import torch

    async def play() -> Any:
        if transport == "disk":
            sender: Any = DiskSender(tmp_path, 200_000)
        else:
            sender = CollectiveSender(
                BucketLayout(200_000), backend="gloo", device=torch.device("cpu"), host="127.0.0.1", timeout=30
            )
            await sender.connect(WeightReceivers(("engine-0#0",), (1,)), engine.join_weight_group)
        await publish(engine, weights[3])
        by_shm = await engine.weight_checksums()
        for which in (1, 3):
            await publish(engine, weights[which], sender=sender)
        sender.close()
        assert await engine.weight_checksums() == by_shm
        return await engine.generate(request_of(prompt(25), 500))

    result = background.run(play())
    np.testing.assert_allclose(
        result.logprobs, expected_logprobs(weights[3], prompt(25), result.token_ids.tolist()), atol=1e-4
    )


def test_a_pause_can_wait_for_running_answers_or_end_them(
    engine: Any, weights: list[Any], background: Background
) -> None:
    async def play() -> tuple[Any, Any, bool]:
        running = asyncio.create_task(engine.generate(request_of(prompt(5), 600, max_tokens=300)))
        await asyncio.sleep(0.1)
        await engine.pause("wait")
        waited = running.done() or (await asyncio.wait_for(running, 1)) is not None
        late = asyncio.create_task(engine.generate(request_of(prompt(5), 601, max_tokens=5)))
        await asyncio.sleep(0.2)
        assert not late.done()
        await engine.resume()
        await late
        ended = asyncio.create_task(engine.generate(request_of(prompt(5), 602, max_tokens=900)))
        await until_sampling(engine, ended)
        await engine.pause("abort")
        result = await asyncio.wait_for(ended, 2)
        await engine.resume()
        return await running, result, waited

    finished, cut, _ = background.run(play())
    assert finished.finish_reason == "length" and len(finished.token_ids) == 300
    assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 900
