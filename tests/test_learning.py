"""Whole trainings: the demo learns, learns from the rewards alone, and keeps the staleness bound. Minutes each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl import AgentLoop, Policy, Reward, RunResult, Task, train
from agentrl.agents.math import MathAgent
from agentrl.sdk import as_reward

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "math.yaml"


class NoReward(MathAgent):
    """Plays like the demo's agent, but no training episode's reward depends on what it did."""

    async def run(self, task: Task, policy: Policy) -> Reward:
        own = as_reward(await super().run(task, policy))
        if task.split == "val":
            return own
        return Reward(float(hash((task.id, id(self))) % 3 == 0), parts=own.parts)


def run(folder: Path, *overrides: str, loop: type[AgentLoop] | None = None) -> tuple[RunResult, list[dict[str, Any]]]:
    log = (folder / "log").open("w")
    result = train(CONFIG, [f"trainer.output_dir={folder}", *overrides], loop=loop, console=Console(file=log))
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return result, [row for row in map(json.loads, lines) if "actor/loss" in row]


def test_the_demo_reaches_its_accuracy_on_held_out_tasks(tmp_path: Path) -> None:
    result, rows = run(tmp_path, "data.seed=3")
    assert result.accuracy_before is not None and 0.2 <= result.accuracy_before <= 0.45
    assert result.accuracy_after is not None and result.accuracy_after >= 0.9
    assert max(row["staleness/lag_max"] for row in rows) == 2
    assert sum(row["overlap/engine_tokens"] for row in rows) > 0
    assert sum(result.fates.values()) == result.dispatched


def test_without_informative_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "data.seed=3", loop=NoReward)
    assert result.accuracy_after is not None and result.accuracy_after <= 0.65


def test_an_own_agent_learns_to_use_a_tool(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    overrides = [f"trainer.output_dir={tmp_path}"]
    result = train(ROOT / "examples" / "my_agent.yaml", overrides, console=Console(file=log))
    assert result.accuracy_after is not None and result.accuracy_after >= 0.9


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_no_trained_token_is_older_than_the_bound(bound: int, tmp_path: Path) -> None:
    overrides = (f"rollout.max_head_offpolicyness={bound}", "trainer.total_steps=10", "val.limit=32")
    result, rows = run(tmp_path, *overrides)
    assert max(row["staleness/lag_max"] for row in rows) == bound
    assert sum(result.fates.values()) == result.dispatched
    if bound == 0:
        assert max(row["mismatch/max"] for row in rows) < 1e-3


def test_without_partial_rollout_no_trajectory_mixes_versions(tmp_path: Path) -> None:
    overrides = ("async_training.partial_rollout=false", "trainer.total_steps=10", "val.limit=32")
    _, rows = run(tmp_path, *overrides)
    assert all(row["staleness/partial_ratio"] == 0 for row in rows)
    assert max(row["staleness/lag_max"] for row in rows) == 2
