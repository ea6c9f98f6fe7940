"""SGLang as an engine when things go wrong: flushes, updates, answers and servers that fail have typed errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.record import EngineDied, EngineError, WeightTransferError
from agentrl.weights.disk import DiskSender
from agentrl.weights.shm import ShmSender
from tests.support.asynchrony import asynchronous
from tests.support.sglang_answers import RequestOf, eventually


@asynchronous
async def test_a_slow_or_refused_flush_is_tried_again(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve(seconds=4.0) as (engine, server):
        server.failures["/flush_cache"] = deque([(400, "Flush cache failed.")] * 3)
        server.delays["/flush_cache"] = 0.1
        await publish(engine, 1)
        assert server.flushes == 1 and len(server.calls["/flush_cache"]) == 4


@asynchronous
async def test_a_flush_that_never_comes_fails_the_update(
    serve: Callable[..., Any], publish: Callable[..., Any]
) -> None:
    async with serve(seconds=1.0) as (engine, server):
        server.failures["/flush_cache"] = deque([(400, "pending requests")] * 1000)
        with pytest.raises(WeightTransferError, match="pending requests"):
            await publish(engine, 1)
        with pytest.raises(EngineError, match="mixture"):
            await engine.resume()
        server.failures.clear()
        await publish(engine, 2)
        assert (await engine.stats()).version == 2


@asynchronous
async def test_failed_updates_are_typed_and_the_next_one_begins_from_nothing(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf, tmp_path: Path
) -> None:
    async with serve(expected=frozenset({"weight", "layer.0", "layer.9"})) as (engine, _):
        with pytest.raises(EngineError, match="pause the engine"):
            await engine.start_weight_update()
        with pytest.raises(WeightTransferError, match=r"layer\.9"):
            await publish(engine, 1)
    async with serve(seconds=0.3) as (engine, server):
        for failure in [(400, '{"success": false, "message": "no"}'), (200, '{"success": false}'), (200, "garbage")]:
            server.failures["/update_weights_from_disk"] = deque([failure])
            with pytest.raises(WeightTransferError):
                await publish(engine, 1)
        server.delays["/update_weights_from_disk"] = 1.0
        with pytest.raises(WeightTransferError, match=r"within 0\.3 s"):
            await publish(engine, 1)
        server.delays.clear()
        await publish(engine, 2)
        assert (await engine.generate(request_of([1], max_tokens=2))).versions.tolist() == [2, 2]
        assert list((tmp_path / "updates").iterdir()) == []


def flip_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


@asynchronous
async def test_damaged_and_lost_buckets_are_noticed(serve: Callable[..., Any], tmp_path: Path) -> None:
    tensors = [(f"t{i}", torch.full((64,), float(i))) for i in range(4)]
    async with serve() as (engine, _):
        await engine.pause()
        await engine.start_weight_update()

        async def damage(bucket: Any) -> None:
            flip_last_byte(Path(bucket.segment))
            await engine.update_weights(bucket)

        with pytest.raises(WeightTransferError, match="bucket 0: checksum"):
            await DiskSender(tmp_path / "one", 64).send(tensors, damage)
        await engine.start_weight_update()

        async def lose(bucket: Any) -> None:
            if bucket.index != 1:
                await engine.update_weights(bucket)

        with pytest.raises(WeightTransferError, match="bucket 2 came where bucket 1 was due"):
            await DiskSender(tmp_path / "two", 64).send(tensors, lose)
        await engine.start_weight_update()
        folder = tmp_path / "segments"
        folder.mkdir()
        with pytest.raises(WeightTransferError, match=r"weights\.transport"):
            await ShmSender(folder, 4096).send(tensors, engine.update_weights)


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (lambda answer: "<html>", "not JSON"),
        (lambda answer: "[]", "answered"),
        (lambda answer: {"meta_info": {}}, "no answer"),
        (lambda answer: _without(answer, "output_token_logprobs"), "0 log-probs for the 8 tokens"),
        (lambda answer: _without(answer, "weight_versions"), "which weights"),
        (lambda answer: _shorter(answer), "7 log-probs for the 8 tokens"),
        (lambda answer: _shorter_context(answer), "shorter than rollout.max_model_len"),
        (lambda answer: _ended(answer, {"type": "stop", "matched": "NaN happened"}), "NaN happened"),
        (lambda answer: _ended(answer, {"type": "else"}), "'else'"),
    ],
)
@asynchronous
async def test_garbage_is_a_typed_error(
    serve: Callable[..., Any], request_of: RequestOf, mangle: Callable[[Any], Any], message: str
) -> None:
    async with serve() as (engine, server):
        server.mangle = mangle
        with pytest.raises(EngineError, match=message):
            await engine.generate(request_of([1, 2]))
        server.mangle = lambda answer: answer
        assert len((await engine.generate(request_of([1, 2]))).token_ids) == 8


def _without(answer: dict[str, Any], key: str) -> dict[str, Any]:
    return {**answer, "meta_info": {name: value for name, value in answer["meta_info"].items() if name != key}}


def _shorter(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {**answer, "meta_info": {**meta, "output_token_logprobs": meta["output_token_logprobs"][:-1]}}


def _shorter_context(answer: dict[str, Any]) -> dict[str, Any]:
    return {**_shorter(answer), "output_ids": answer["output_ids"][:-1]}


def _ended(answer: dict[str, Any], reason: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "meta_info": {**answer["meta_info"], "finish_reason": reason}}


@asynchronous
async def test_http_errors_are_typed_and_bad_requests_stay_here(
    serve: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve() as (engine, server):
        server.failures["/generate"] = deque([(500, "scheduler hit an exception")])
        with pytest.raises(EngineError, match="500: scheduler hit"):
            await engine.generate(request_of([1]))
        for bad in [
            request_of([1], max_tokens=1024),
            request_of([]),
            request_of([97]),
            request_of([1], temperature=-1),
        ]:
            with pytest.raises(EngineError):
                await engine.generate(bad)
        assert len(server.calls["/generate"]) == 1


@asynchronous
async def test_the_death_of_the_server_is_noticed(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, server):
        watching = asyncio.create_task(engine.watch())
        call = asyncio.create_task(engine.generate(request_of([1], max_tokens=1000)))
        await eventually(lambda: server.running)
        assert not watching.done()
        await server.die()
        with pytest.raises(EngineError):
            await call
        with pytest.raises(EngineDied, match="gone"):
            await watching
        with pytest.raises(EngineDied):
            await engine.generate(request_of([1]))


@asynchronous
async def test_a_server_with_other_weights_is_not_ours(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engine.sglang_engine._HEALTH_SECONDS", 0.01)
    async with serve() as (engine, server):
        server.version = "default"
        with pytest.raises(EngineDied, match="'default'"):
            await engine.watch()


@asynchronous
async def test_watch_does_not_mind_a_pause_and_ends_with_close(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engine.sglang_engine._HEALTH_SECONDS", 0.01)
    async with serve() as (engine, _):
        await engine.pause()
        watching = asyncio.create_task(engine.watch())
        await asyncio.sleep(0.1)
        assert not watching.done()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await watching
