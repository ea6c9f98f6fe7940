"""A process whose component fails ends with it: nobody goes on asking it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.cluster.process import run_engine
from agentrl.cluster.rpc import RpcClient, connected
from agentrl.cluster.spec import RunSpec
from agentrl.config import load_config
from agentrl.engine import torch_engine
from agentrl.record import EngineError
from agentrl.record.protocols import Engine, GenerateRequest
from agentrl.tiny import tiny_model_path


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[RunSpec]:
    config = load_config(
        {"data": {"train": "t.jsonl", "max_prompt_length": 64, "max_response_length": 16}},
        ["trainer.device=cpu", "rollout.max_model_len=128"],
    )
    with tempfile.TemporaryDirectory(prefix="process-") as sockets:
        (tmp_path / "segments").mkdir()
        yield RunSpec(
            config=config.model_dump(mode="json"),
            model_path=str(tiny_model_path()),
            run_dir=str(tmp_path),
            sockets=sockets,
            segments=str(tmp_path / "segments"),
            plugin_paths=("/a", "/b"),
            engines=2,
        )


def test_a_spec_is_read_as_it_was_written(spec: RunSpec, tmp_path: Path) -> None:
    spec.write(tmp_path / "spec.json")
    assert RunSpec.read(tmp_path / "spec.json") == spec
    assert spec.run_config().rollout.max_model_len == 128
    assert spec.engine_roles() == ["engine-0", "engine-1"]


def test_an_engine_that_fails_ends_its_process(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch_engine.load_torch_engine

    def load_faulty(*args: Any, **limits: Any) -> torch_engine.TorchEngine:
        engine = load(*args, **limits)

        def out_of_memory(*_: Any) -> None:
            raise RuntimeError("out of memory")

        engine._batch._model.register_forward_hook(out_of_memory)
        return engine

    monkeypatch.setattr(torch_engine, "load_torch_engine", load_faulty)

    async def play() -> None:
        process = asyncio.create_task(run_engine(spec, "engine-0"))
        client = RpcClient(spec.address("engine-0"), Engine, name="engine-0", silence=1.0)
        async with connected(client):
            assert (await client.proxy.stats()).version == 0
            call = asyncio.create_task(
                client.proxy.generate(GenerateRequest("r", np.arange(4, dtype=np.int32), 4, 1.0, (), 0))
            )
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(process, timeout=20)
            assert caught.group_contains(EngineError, match="out of memory")
            with pytest.raises(Exception, match=r"out of memory|no sign of life"):
                await asyncio.wait_for(call, timeout=20)

    asyncio.run(play())


def test_a_process_whose_supervisor_is_gone_ends_and_removes_the_runs_folders(spec: RunSpec, tmp_path: Path) -> None:
    spec.write(tmp_path / "spec.json")
    command = [sys.executable, "-m", "agentrl.cluster.process", "engine-0", str(tmp_path / "spec.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) != 0
    assert not Path(spec.segments).exists() and not Path(spec.sockets).exists()
