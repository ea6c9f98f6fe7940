"""vLLM's own HTTP server as an engine: the same tokens, updates and errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from agentrl.config import load_config
from agentrl.engine.vllm_server import connect_vllm_server
from agentrl.record import EngineDied, EngineError, GuideError
from agentrl.record.protocols import GenerateResult, WeightReceivers
from agentrl.tiny import tiny_model_path
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import CollectiveSender
from tests.vllm.conftest import Background, expected_logprobs, prompt, request_of, until_sampling


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The command of docs/engines.md."""
    port = free_port()
    log = (tmp_path_factory.mktemp("server") / "log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_path())),
            *("--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"),
            *("--weight-transfer-config", '{"backend": "agentrl"}', "--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm", "--enable-scale-out"),
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
            *("--enforce-eager", "--kv-cache-memory-bytes", "200000000"),
            *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
        ],
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    yield f"http://127.0.0.1:{port}", process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def config_of(*overrides: str) -> Any:
    return load_config(
        {
            "data": {
                "train": "agentrl.envs.math:arithmetic_tasks",
                "max_prompt_length": 256,
                "max_response_length": 64,
            },
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "rollout": {"engine": "vllm", "max_model_len": 512, "engine_urls": ["http://127.0.0.1:1"]},
            "trainer": {"total_steps": 1, "device": "cpu"},
        },
        list(overrides),
    )


@pytest.fixture(scope="module")
def remote(server: tuple[str, Any], background: Background) -> Iterator[Any]:
    url, process = server

    async def connect() -> Any:
        deadline = time.monotonic() + 150
        while True:
            try:
                return await connect_vllm_server(config_of(), url)
            except EngineDied as error:
                assert process.poll() is None and time.monotonic() < deadline, error
                await asyncio.sleep(0.5)

    engine = background.run(connect())
    yield engine
    background.run(engine.close())


def test_updates_under_running_requests(remote: Any, publish: Any, weights: list[Any], background: Background) -> None:
    """By broadcast over gloo, as to another machine; every token is of the version that it says."""

    async def play() -> tuple[list[Any], list[Any], dict[int, int], int]:
        sender = CollectiveSender(
            BucketLayout(200_000), backend="gloo", device=torch.device("cpu"), host="127.0.0.1", timeout=30
        )
        await sender.connect(WeightReceivers(("engine-0#0",), (1,)), remote.join_weight_group)
        model_of = {await publish(remote, weights[1], sender=sender): 1}
        requests = [request_of(prompt(10 + i, i), 700 + i, max_tokens=300) for i in range(4)]
        before = (await remote.stats()).generated_tokens
        calls = [asyncio.create_task(remote.generate(request)) for request in requests]
        for number in range(5):
            await until_sampling(remote, calls[0])
            which = number % 3
            model_of[await publish(remote, weights[which], sender=sender)] = which
        results = await asyncio.gather(*calls)
        sender.close()
        return requests, results, model_of, (await remote.stats()).generated_tokens - before

    requests, results, model_of, generated = background.run(play())
    assert generated == 1200 and len({v for result in results for v in result.versions.tolist()}) > 2
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == 300 and (np.diff(result.versions) >= 0).all()
        for version in set(result.versions.tolist()):
            own = result.versions == version
            expected = expected_logprobs(
                weights[model_of[version]], request.token_ids.tolist(), result.token_ids.tolist()
            )
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=2e-3)


def test_an_abort_ends_one_request_and_no_other(remote: Any, background: Background) -> None:
    async def play() -> tuple[Any, Any]:
        calls = [asyncio.create_task(remote.generate(request_of(prompt(5), i, max_tokens=400))) for i in (800, 801)]
        await until_sampling(remote, calls[0])
        await remote.abort([])
        await remote.abort(["r800"])
        return await calls[0], await calls[1]

    cut, whole = background.run(play())
    assert whole.finish_reason == "length" and len(whole.token_ids) == 400
    assert cut.finish_reason == "abort" and len(cut.token_ids) < 400


def test_guided_answers_are_values_and_schemas_are_refused_with_the_reason(remote: Any, background: Background) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model_path())
    ends = (tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    schema = {"type": "array", "items": {"enum": ["one", 2, None]}, "minItems": 3, "maxItems": 5}

    async def play() -> list[Any]:
        wanted = {"stop_token_ids": ends, "max_tokens": 60, "json_schema": json.dumps(schema)}
        calls = [asyncio.create_task(remote.generate(request_of(prompt(6), 830 + i, **wanted))) for i in range(6)]
        wanted["json_schema"] = '{"type": "array", "uniqueItems": true}'
        with pytest.raises(GuideError, match="not supported"):
            await remote.generate(request_of(prompt(6), 840, **wanted))
        return await asyncio.gather(*calls)

    for result in background.run(play()):
        assert result.finish_reason == "stop" and result.token_ids[-1] in ends
        text = tokenizer.decode(result.token_ids[:-1].tolist(), clean_up_tokenization_spaces=False)
        jsonschema.validate(json.loads(text), schema)


def test_bad_requests_and_a_server_that_does_not_fit_are_errors(
    remote: Any, server: tuple[str, Any], background: Background
) -> None:
    with pytest.raises(EngineError):
        background.run(remote.generate(request_of([10**6], 810)))
    with pytest.raises(EngineError, match=r"max-model-len 512, below rollout\.max_model_len = 1024"):
        background.run(connect_vllm_server(config_of("rollout.max_model_len=1024"), server[0]))
    with pytest.raises(EngineDied, match="is gone"):
        background.run(connect_vllm_server(config_of(), f"http://127.0.0.1:{free_port()}"))


def test_the_end_of_the_server_is_noticed(remote: Any, server: tuple[str, Any], background: Background) -> None:
    async def play() -> None:
        requests = (request_of(prompt(5), 820 + number, max_tokens=500) for number in range(16))
        calls = [asyncio.create_task(remote.generate(request)) for request in requests]
        watch = asyncio.create_task(remote.watch())
        await until_sampling(remote, calls[0])
        os.killpg(server[1].pid, signal.SIGKILL)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(end, EngineDied) for end in ends)
        assert all(isinstance(end, EngineDied | GenerateResult) for end in ends)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(watch, 10)

    background.run(play())
