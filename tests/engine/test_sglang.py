"""SGLang as an engine, against a server that speaks its protocol: exact tokens, log-probs and versions whatever
interrupts an answer, real updates, and typed errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.engine.sglang_engine import SglangEngine
from agentrl.engine.sglang_server import SglangServer
from agentrl.record import EngineError, GuideError
from agentrl.tiny import tiny_model_path
from tests.support.asynchrony import asynchronous
from tests.support.sglang_answers import RequestOf, check, eventually
from tests.support.sglang_server import EOS, ProtocolServer, token_at


@asynchronous
async def test_tokens_and_log_probs_are_exact(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, server):
        requests = [request_of(range(1, 3 + i), seed=i, max_tokens=5 + i) for i in range(6)]
        results = await asyncio.gather(*map(engine.generate, requests))
        for request, result in zip(requests, results, strict=True):
            check(request, result)
            assert len(result.token_ids) == request.max_tokens and result.finish_reason == "length"
        sent = server.calls["/generate"]
        assert [body["sampling_params"]["sampling_seed"] for body in sent] == list(range(6))
        assert all(body["input_ids"] and body["return_logprob"] for body in sent)
        assert len({body["rid"] for body in sent}) == len({len(body["rid"]) for body in sent}) * 6
        stats = await engine.stats()
        assert stats.generated_tokens == sum(5 + i for i in range(6)) and stats.prompt_tokens == sum(range(2, 8))
        assert (stats.running, stats.waiting, stats.version) == (0, 0, 0) and stats.busy_seconds > 0


@asynchronous
async def test_a_stop_token_ends_the_turn_and_is_part_of_it(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, _):
        stop = token_at(3, 6)
        first = next(i for i in range(9) if token_at(3, 2 + i) == stop)
        result = await engine.generate(request_of([1, 2], seed=3, max_tokens=30, stop=(stop,)))
        assert result.finish_reason == "stop" and result.token_ids.tolist()[-1] == stop
        assert len(result.token_ids) == first + 1


@asynchronous
async def test_a_schema_goes_with_the_request_and_a_bad_one_comes_back_as_a_typed_error(
    serve: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve() as (engine, server):
        request = request_of([1, 2], max_tokens=4, stop=(EOS,), json_schema='{"type": "object"}')
        await engine.generate(request)
        await engine.generate(request_of([1, 2], seed=1, max_tokens=4, stop=(EOS,)))
        guided, plain = (body["sampling_params"] for body in server.calls["/generate"])
        assert guided["json_schema"] == request.json_schema and "json_schema" not in plain
        server.failures["/generate"] = deque([(400, "Failed to compile json grammar: no such type"), (400, "no")])
        with pytest.raises(GuideError, match="no such type"):
            await engine.generate(request)
        with pytest.raises(EngineError, match="400"):
            await engine.generate(request_of([1, 2]))
        with pytest.raises(GuideError, match="not JSON"):
            await engine.generate(request_of([1, 2], stop=(EOS,), json_schema="{"))


@asynchronous
async def test_the_models_own_end_does_not_end_what_did_not_ask_for_it(
    serve: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve() as (engine, server):
        original = server._step

        def step(request: Any) -> None:  # the first call of the request ends early
            if len(server.calls["/generate"]) == 1:
                request.sampling["custom_eos_at"] = 3
            original(request)

        server._step = step
        unused = next(token for token in range(EOS) if token not in {token_at(4, i) for i in range(60)})
        result = await engine.generate(request_of([1, 2], seed=4, max_tokens=12, stop=(unused,)))
        assert len(server.calls["/generate"]) == 2
        assert len(result.token_ids) == 12 and result.token_ids[3] == EOS and result.finish_reason == "length"


@pytest.mark.parametrize("keeps_cache", [False, True], ids=["recompute", "keep"])
@asynchronous
async def test_requests_survive_five_updates_with_exact_versions(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf, keeps_cache: bool
) -> None:
    async with serve(keeps_cache=keeps_cache) as (engine, server):
        requests = [request_of([1, 2, 3], seed=i, max_tokens=150 + 20 * i) for i in range(4)]
        calls = [asyncio.create_task(engine.generate(request)) for request in requests]
        for version in range(1, 6):
            await eventually(lambda: server.running)
            await asyncio.sleep(0.03)
            await publish(engine, version)
        results = await asyncio.gather(*calls)
        for request, result in zip(requests, results, strict=True):
            check(request, result)
            assert len(result.token_ids) == request.max_tokens and result.finish_reason == "length"
            assert (np.diff(result.versions) >= 0).all()
            assert set(result.versions.tolist()) == {0, 1, 2, 3, 4, 5}
        assert len(server.calls["/generate"]) == 4 and server.aborts == 0  # none began anew
        assert server.flushes == (0 if keeps_cache else 5)
        modes = {body["mode"] for body in server.calls["/pause_generation"]}
        assert modes == {"in_place" if keeps_cache else "retract"}
        bodies = server.calls["/update_weights_from_disk"]
        assert not any(body["abort_all_requests"] or body["flush_cache"] for body in bodies)
        assert (await engine.stats()).version == 5 and (await engine.stats()).paused_seconds > 0


@asynchronous
async def test_an_update_leaves_nothing_behind(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf, tmp_path: Path
) -> None:
    async with serve() as (engine, server):
        await publish(engine, 1)
        assert list((tmp_path / "updates").iterdir()) == []
        assert sorted(server.weights) == ["layer.0", "layer.1", "layer.2", "layer.3", "layer.4", "weight"]
        assert float(server.weights["layer.4"][0]) == 1.0
        result = await engine.generate(request_of([1], max_tokens=2, min_version=1))
        assert result.versions.tolist() == [1, 1]
        with pytest.raises(EngineError, match="asked for version 2"):
            await engine.generate(request_of([1], min_version=2))


@asynchronous
async def test_what_somebody_else_aborts_goes_on_within_its_budget(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve() as (engine, server):
        request = request_of([1, 2, 3], seed=7, max_tokens=120)
        call = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.05)
        server._abort("")
        await asyncio.sleep(0.05)
        await publish(engine, 1)
        await asyncio.sleep(0.05)
        server._abort("")
        result = await call
        check(request, result)
        assert len(result.token_ids) == 120 and result.finish_reason == "length"
        assert set(result.versions.tolist()) == {0, 1}
        sent = server.calls["/generate"]
        assert len(sent) == 3
        for body in sent:
            assert len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] == 3 + 120
            assert body["sampling_params"]["sampling_seed"] == 7


@asynchronous
async def test_a_stop_text_is_found_over_an_interruption(request_of: RequestOf) -> None:
    from transformers import AutoTokenizer

    server = ProtocolServer({"weight_version": "0"}, step_seconds=0.01)
    await server.start()
    model = str(tiny_model_path())
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokens = [token_at(6, 2 + i) for i in range(40)]
    stop = tokenizer.decode(tokens[:14], clean_up_tokenization_spaces=False)[-6:]
    engine = SglangEngine(
        SglangServer(server.url), model, max_model_len=1024, vocabulary=97, keeps_cache=False, timeout=5
    )
    try:
        call = asyncio.create_task(engine.generate(request_of([1, 2], seed=6, max_tokens=40, stop_texts=(stop,))))
        await eventually(lambda: server.running and len(server.running[0].output) == 12)
        server._abort("")
        result = await call
        assert len(server.calls["/generate"]) == 2 and result.finish_reason == "stop"
        text = tokenizer.decode(result.token_ids.tolist(), clean_up_tokenization_spaces=False)
        assert stop in text and len(result.token_ids) <= 14
        assert result.token_ids.tolist() == tokens[: len(result.token_ids)]
    finally:
        await engine.close()
        await server.die()


@asynchronous
async def test_an_abort_ends_only_its_request_with_what_there_is(
    serve: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve() as (engine, server):
        requests = [request_of([1, 2], seed=i, max_tokens=150, request_id=name) for i, name in enumerate(["r1", "r10"])]
        calls = [asyncio.create_task(engine.generate(request)) for request in requests]
        await eventually(lambda: len(server.running) == 2 and len(server.running[0].output) > 5)
        await engine.abort(["r1", "not-there"])
        aborted, other = await asyncio.gather(*calls)
        assert aborted.finish_reason == "abort" and 5 < len(aborted.token_ids) < 150
        assert other.finish_reason == "length" and len(other.token_ids) == 150
        check(requests[0], aborted)
        check(requests[1], other)


@asynchronous
async def test_a_paused_request_can_be_aborted(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, server):
        calls = [asyncio.create_task(engine.generate(request_of([1], seed=i, max_tokens=500))) for i in range(2)]
        await eventually(lambda: len(server.running) == 2 and len(server.running[0].output) > 9)
        await engine.pause()
        held = asyncio.create_task(engine.generate(request_of([1], seed=2)))
        await asyncio.sleep(0.02)
        assert (await engine.stats()).waiting == 3 and len(server.calls["/generate"]) == 2
        await engine.abort(["r0", "r2"])
        result = await calls[0]
        check(request_of([1], seed=0), result)
        assert result.finish_reason == "abort" and len(result.token_ids) >= 8
        assert (await held).finish_reason == "abort" and len((await held).token_ids) == 0
        await engine.resume()
        assert (await calls[1]).finish_reason == "length"


@asynchronous
async def test_a_cancelled_request_leaves_the_server(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, server):
        call = asyncio.create_task(engine.generate(request_of([1], max_tokens=1000)))
        await eventually(lambda: server.running)
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: not server.running)
        assert (await engine.stats()).running == 0


@asynchronous
async def test_pauses_that_wait_and_that_abort(serve: Callable[..., Any], request_of: RequestOf) -> None:
    async with serve() as (engine, server):
        call = asyncio.create_task(engine.generate(request_of([1], seed=1, max_tokens=60)))
        await eventually(lambda: server.running)
        pausing = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(engine.generate(request_of([1], seed=2, max_tokens=500)))
        await pausing
        assert (await call).finish_reason == "length" and len(server.calls["/generate"]) == 1
        await engine.resume()
        await eventually(lambda: server.running and len(server.running[0].output) > 3)
        await engine.pause("abort")
        assert (await late).finish_reason == "abort" and len((await late).token_ids) > 3
        assert not any(body.get("abort_all") for body in server.calls["/abort_request"])


@asynchronous
async def test_sleep_needs_an_idle_server_and_finds_one(
    serve: Callable[..., Any], publish: Callable[..., Any], request_of: RequestOf
) -> None:
    async with serve(keeps_cache=True) as (engine, server):
        call = asyncio.create_task(engine.generate(request_of([1], max_tokens=500)))
        await eventually(lambda: server.running)
        await engine.pause()
        await engine.sleep()
        assert (await call).finish_reason == "abort" and server.asleep
        await engine.wake()
        assert not server.asleep
        with pytest.raises(EngineError, match="finish an update"):
            await engine.resume()
        await publish(engine, 1)
        assert (await engine.generate(request_of([1], max_tokens=3))).versions.tolist() == [1, 1, 1]
