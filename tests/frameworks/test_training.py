"""A whole training of an agent on OpenAI's Agents SDK, over Responses: real engine, real updates, real processes."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from agentrl import train

FOLDER = Path(__file__).parents[2] / "examples" / "external"


def test_an_agent_of_the_agents_sdk_learns_to_use_its_tool(tmp_path: Path) -> None:
    overrides = [
        f"trainer.output_dir={tmp_path}",
        "agent.loop=agents_sdk_agent:Solver",
        "trainer.total_steps=10",
        "val.limit=128",
    ]
    with (tmp_path / "log").open("w") as log:
        result = train(FOLDER / "arithmetic.yaml", overrides, console=Console(file=log))
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    assert result.accuracy_before is not None and result.accuracy_before <= 0.5
    assert result.accuracy_after is not None and result.accuracy_after >= 0.75
    assert sum(rewards[-3:]) >= sum(rewards[:3]) + 0.9
    assert set(result.fates) <= {"trained", "cancelled"}
