"""SGLang as an engine, against a server that speaks its protocol: exact tokens, log-probs and versions whatever
interrupts an answer, real updates, and typed errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config import ConfigError, load_config
from agentrl.engine.sglang_engine import SglangEngine, start_sglang_engine
from agentrl.engine.sglang_payloads import server_arguments
from agentrl.engine.sglang_server import SglangServer
from agentrl.record import EngineDied, EngineError, WeightTransferError
from agentrl.record.protocols import GenerateRequest, GenerateResult, WeightReceivers
from agentrl.tiny import tiny_model_path
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import CollectiveSender
from agentrl.weights.disk import DiskSender
from agentrl.weights.shm import ShmSender
from tests.support.asynchrony import asynchronous
from tests.support.sglang_server import EOS, ProtocolServer, logprob_of, token_at

RequestOf = Callable[..., GenerateRequest]


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model folder with the config that belongs to updates."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def serve(model_path: Path) -> Callable[..., Any]:
    """`async with serve(keeps_cache=True) as (engine, server)`: an engine on a server of its own."""

    @asynccontextmanager
    async def start(*, seconds: float = 10.0, **options: Any) -> AsyncIterator[tuple[SglangEngine, ProtocolServer]]:
        server = ProtocolServer({"weight_version": "0"})
        await server.start()
        options = {"max_model_len": 1024, "vocabulary": 97, "keeps_cache": False, **options}
        engine = SglangEngine(SglangServer(server.url), str(model_path), timeout=seconds, **options)
        try:
            yield engine, server
        finally:
            await engine.close()
            await server.die()

    return start


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Any]:
    """`await publish(engine, version)`: a whole update through files; its weights are those of that version."""
    sender = DiskSender(tmp_path / "updates", 256)

    async def update(engine: SglangEngine, version: int, *, weight: float | None = None) -> None:
        tensors = [(f"layer.{i}", torch.full((40,), float(version))) for i in range(5)]
        tensors.insert(2, ("weight", torch.full((3, 4), float(version if weight is None else weight))))
        await engine.pause()
        await engine.start_weight_update()
        await sender.send(tensors, engine.update_weights)
        await engine.finish_weight_update(version)
        await engine.resume()

    return update


def check(request: GenerateRequest, result: GenerateResult) -> None:
    """Every token is what follows, and its version is that of the weights that its log-prob tells of."""
    count, start = len(result.token_ids), len(request.token_ids)
    assert result.token_ids.tolist() == [token_at(request.seed, start + i) for i in range(count)]
    expected = [
        logprob_of(version, token)
        for version, token in zip(result.versions.tolist(), result.token_ids.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(result.logprobs, np.array(expected, np.float32))
    assert (result.token_ids.dtype, result.versions.dtype) == (np.int32, np.int32)


async def eventually(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  a condition of any kind has no event to wait for
        await asyncio.sleep(0.005)


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


def config_of(*overrides: str) -> Any:
    return load_config(
        {
            "model": {"path": "tiny"},
            "data": {"train": "agentrl.envs.math:arithmetic_tasks", "max_prompt_length": 256},
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "rollout": {"engine": "sglang", "max_model_len": 1024, "max_batch_size": 16},
            "trainer": {"total_steps": 1, "device": "cpu"},
        },
        list(overrides),
    )


def test_the_command_line_is_what_the_config_says() -> None:
    config = config_of(
        *("rollout.tensor_parallel_size=2", "rollout.n_gpus_per_node=2", "rollout.kv_cache_tokens=5000"),
        *("rollout.kv_on_update=keep", "rollout.engine_args.mem_fraction_static=0.7"),
        *("rollout.engine_args.enable_memory_saver=true", "rollout.engine_args.trust_remote_code=false"),
    )
    arguments = server_arguments(config, "/model", 1, device="cuda", port=7)
    flags = dict(itertools.pairwise(arguments))
    assert flags["--model-path"] == "/model" and flags["--port"] == "7" and flags["--device"] == "cuda"
    assert flags["--tp-size"] == "2" and flags["--context-length"] == "1032" and flags["--max-total-tokens"] == "5008"
    assert flags["--max-running-requests"] == "16" and flags["--random-seed"] == str(config.data.seed + 1)
    assert flags["--mem-fraction-static"] == "0.7" and "--enable-memory-saver" in arguments
    assert "--disable-overlap-schedule" in arguments and "--trust-remote-code" not in arguments
    for name in ("model", "port", "tensor-parallel-size", "dp_size", "skip_tokenizer_init"):
        config.rollout.engine_args.clear()
        config.rollout.engine_args[name] = 1
        with pytest.raises(EngineError, match=f"engine_args.{name.replace('-', '_')} .* set "):
            server_arguments(config, "/model", 0, device="cpu", port=7)


@asynchronous
async def test_what_training_needs_is_asked_of_a_foreign_server(request_of: RequestOf) -> None:
    server = ProtocolServer({"max_req_input_len": 1026, "tp_size": 4})
    await server.start()
    model = str(tiny_model_path())
    config = config_of(f"rollout.engine_urls=[{server.url}]", "weights.transport=disk")
    server._is_pause = server._engine_paused = True  # by somebody who is gone
    engine = await start_sglang_engine(config, model, 0)
    assert (await engine.stats()).workers == 4
    assert (await engine.generate(request_of([1], max_tokens=2))).versions.tolist() == [0, 0]
    await engine.close()
    for change, message in [
        ({"max_req_input_len": 1023}, "--context-length 1032"),
        ({"dp_size": 2}, "dp_size 2"),
        ({"skip_tokenizer_init": True}, "skip-tokenizer-init"),
    ]:
        good, server.info = server.info, {**server.info, **change}
        with pytest.raises(EngineError, match=message):
            await start_sglang_engine(config, model, 0)
        server.info = good
    server.info["disable_overlap_schedule"] = False
    await (await start_sglang_engine(config, model, 0)).close()
    keeping = config_of(f"rollout.engine_urls=[{server.url}]", "weights.transport=disk", "rollout.kv_on_update=keep")
    with pytest.raises(EngineError, match="--disable-overlap-schedule"):
        await start_sglang_engine(keeping, model, 0)
    await server.die()
    with pytest.raises(EngineDied, match="gone"):
        await start_sglang_engine(config, model, 0)
    with pytest.raises(ConfigError, match=r"weights\.transport"):
        config_of("weights.transport=shm")


@asynchronous
async def test_without_sglang_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.sglang_server.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'agentrl\[sglang\]'"):
        await start_sglang_engine(config_of(), str(tiny_model_path()), 0)


@pytest.fixture
def sglang_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name whose `launch_server` is the protocol server."""
    folder = tmp_path / "packages" / "sglang"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "launch_server.py").write_text("from tests.support.sglang_server import main\n\nmain()\n")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), root]))
    monkeypatch.setattr("agentrl.engine.sglang_server.find_spec", lambda name: object())
    monkeypatch.setattr("agentrl.engine.sglang_engine._HEALTH_SECONDS", 0.2)


@asynchronous
async def test_a_server_of_ours_starts_serves_and_ends(sglang_package: None, request_of: RequestOf) -> None:
    engine = await start_sglang_engine(config_of("rollout.threads=2"), str(tiny_model_path()), 0)
    process = engine._server.process
    assert process is not None
    info = json.loads(await engine._server.call("/server_info"))
    assert info["threads"] == "2" and info["pid"] == process.pid and "--random-seed" in info["arguments"]
    result = await engine.generate(request_of([1, 2], seed=5))
    check(request_of([1, 2], seed=5), result)
    watching = asyncio.create_task(engine.watch())
    await asyncio.sleep(0.3)
    assert not watching.done()
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await watching
    await engine.close()


@asynchronous
async def test_close_ends_a_server_of_ours(sglang_package: None) -> None:
    engine = await start_sglang_engine(config_of(), str(tiny_model_path()), 0)
    process = engine._server.process
    assert process is not None
    started = time.perf_counter()
    await engine.close()
    assert process.returncode is not None and time.perf_counter() - started < 5


@asynchronous
async def test_a_server_that_does_not_start_is_an_error(sglang_package: None) -> None:
    with pytest.raises(EngineError, match="ended with status 1 while it started"):
        await start_sglang_engine(config_of("rollout.engine_args.fail=true"), str(tiny_model_path()), 0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@asynchronous
async def test_weights_over_a_process_group(sglang_package: None, request_of: RequestOf) -> None:
    """SGLang makes its group as the protocol server does; it gets flat buckets without gaps."""
    engine = await start_sglang_engine(config_of("weights.timeout=10"), str(tiny_model_path()), 0)
    engine._expected = frozenset({"weight", "layer.0"})
    sender = CollectiveSender(
        BucketLayout(4096),
        backend="gloo",
        device=torch.device("cpu"),
        host="127.0.0.1",
        timeout=10,
    )
    try:
        tensors = [(f"layer.{i}", torch.full((301,), float(i), dtype=torch.bfloat16)) for i in range(9)]
        tensors.append(("weight", torch.full((7,), 3.0, dtype=torch.bfloat16)))
        call = asyncio.create_task(engine.generate(request_of([1], seed=4, max_tokens=900)))
        await asyncio.sleep(0.2)
        await engine.pause()
        await sender.connect(WeightReceivers(("sglang",), (1,)), engine.join_weight_group)
        await engine.start_weight_update()
        with pytest.raises(WeightTransferError, match=r"alignment=1, split=False"):
            await sender.send(tensors, engine.update_weights)
        sender.layout = BucketLayout(4096, alignment=1, split=False, one_dtype=True)
        await sender.connect(WeightReceivers(("sglang",), (1,)), engine.join_weight_group)
        await engine.start_weight_update()
        await sender.send(tensors, engine.update_weights)
        await engine.finish_weight_update(3)
        await engine.resume()
        result = await call
        check(request_of([1], seed=4), result)
        assert set(result.versions.tolist()) == {0, 3} and len(result.token_ids) == 900
    finally:
        sender.close()
        await engine.close()


def test_nothing_listens_where_no_server_is() -> None:
    async def play() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = SglangServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
            with pytest.raises(EngineDied, match="gone"):
                await server.call("/model_info")
            await server.close()

    asyncio.run(play())
