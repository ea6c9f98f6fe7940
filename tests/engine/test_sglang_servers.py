"""The SGLang servers that a run starts, and those that it finds."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import ConfigError, load_config
from agentrl.engine.sglang_engine import start_sglang_engine
from agentrl.engine.sglang_payloads import server_arguments
from agentrl.engine.sglang_server import SglangServer
from agentrl.record import EngineDied, EngineError, WeightTransferError
from agentrl.record.protocols import WeightReceivers
from agentrl.tiny import tiny_model_path
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import CollectiveSender
from tests.support.asynchrony import asynchronous
from tests.support.sglang_answers import RequestOf, check
from tests.support.sglang_server import ProtocolServer


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
