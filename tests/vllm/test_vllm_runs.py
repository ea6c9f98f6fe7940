"""Whole runs with vLLM as the engine: they learn, log-probs agree, and the death of an engine loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.cluster.local import LocalHost, RunState
from agentrl.config import RunConfig, load_config
from agentrl.observe import create_run_dir
from agentrl.tiny import tiny_model_path

EXAMPLE = Path(__file__).parents[2] / "examples" / "math.yaml"


def config_of(folder: Path, *overrides: str) -> RunConfig:
    own = [
        "rollout.engine=vllm",
        "trainer.device=cpu",
        f"trainer.output_dir={folder}",
        "data.train_args.count=512",
        "data.val_args.count=64",
        "rollout.max_concurrent=64",
    ]
    return load_config(EXAMPLE, [*own, *overrides])


def rows_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def play(config: RunConfig, when: Any = lambda state, host: None) -> tuple[Path, RunState]:
    """A run; `when` sees every state of it."""
    run_dir = create_run_dir(config.trainer.output_dir, "vllm")

    async def run() -> RunState:
        async with LocalHost(config, run_dir, str(tiny_model_path()), ()) as host:
            last: RunState | None = None
            async for state in host.states():
                last = state
                when(state, host)
            await host.wait_for_trainer()
            assert last is not None
            return last

    return run_dir, asyncio.run(run())


MARK = {"AGENTRL_TEST_RUN": secrets.token_hex(8)}
"""In the environment of all processes that these tests start, and of those start."""
os.environ |= MARK


def left_behind() -> list[str]:
    """Processes of these tests that nobody has any more; what was killed may take a moment to be gone."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        own = {child.pid for child in psutil.Process().children(recursive=True)}  # engines of other tests
        for process in psutil.process_iter(["cmdline", "name", "status", "environ"]):
            ours = MARK.items() <= (process.info["environ"] or {}).items()
            dead = process.info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if ours and not dead and process.pid not in own | {os.getpid()}:
                found.append(" ".join(process.info["cmdline"] or [process.info["name"] or ""]).strip())
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.parametrize("adapters", [(), ("model.lora_rank=4", "model.lora_merge=false", "actor.optim.lr=0.01")])
def test_engine_and_trainer_agree_on_log_probs(adapters: tuple[str, ...], tmp_path: Path) -> None:
    """Without staleness every token was sampled by the very weights that train on it."""
    config = config_of(
        tmp_path,
        "rollout.max_head_offpolicyness=0",
        "trainer.total_steps=4",
        "trainer.val_before_train=false",
        "actor.ppo_mini_batch_size=4",
        *adapters,
    )
    run_dir, state = play(config)
    rows = [row for row in rows_of(run_dir, "metrics.jsonl") if "actor/loss" in row]
    assert len(rows) == 4 and state.trainer.version == 4
    for row in rows:
        assert row["staleness/lag_max"] == 0
        assert abs(row["mismatch/k3"]) < 1e-3 and row["mismatch/max"] < 1e-2
        assert 0 < row["mismatch/engine_max"] <= row["mismatch/max"]
        assert row["time/publish"] >= row["time/paused"] > 0
    assert not left_behind()


@pytest.mark.parametrize(("moment", "transport"), [("generation", "shm"), ("update", "collective")])
def test_one_of_two_engines_dies(moment: str, transport: str, tmp_path: Path) -> None:
    stopped: list[int] = []
    killed: list[int] = []

    def kill(state: RunState, host: LocalHost) -> None:
        updating = state.trainer.phase == "publishing weights"
        if killed:
            return
        child = next(child for child in host._processes.children if child.role == "engine-1")
        if not stopped and state.trainer.version >= 1 and not updating:
            stopped.append(child.process.pid)
            # So the next update can't end before it is killed.
            os.kill(child.process.pid, signal.SIGSTOP if moment == "update" else signal.SIGKILL)
        if stopped and updating == (moment == "update"):
            killed.append(child.process.pid)
            os.kill(child.process.pid, signal.SIGKILL)

    config = config_of(
        tmp_path,
        "rollout.n_gpus_per_node=2",
        f"weights.transport={transport}",
        "weights.timeout=30",
        "trainer.total_steps=8",
        "trainer.val_before_train=false",
        "actor.ppo_mini_batch_size=4",
    )
    run_dir, state = play(config, kill)
    assert killed == stopped != []
    assert state.trainer.version == 8 and not state.trainer.problem
    fates = rows_of(run_dir, "fates.jsonl")
    assert len({row["episode_id"] for row in fates}) == len(fates) == state.rollout.dispatched
    counted = {row["fate"] for row in fates}
    assert "trained" in counted and not counted & {"engine_error", "env_error", "agent_error", "stale"}
    assert sum(row["fate"] == "trained" for row in fates) == 8 * 2 * 4 * 8
    assert not left_behind()
