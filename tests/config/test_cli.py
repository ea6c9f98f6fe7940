"""`agentrl config`: output on stdout, errors on stderr with exit status 2 and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.config import app
from agentrl.config import load_config

runner = CliRunner()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("extends: modes/async_partial\ndata: {train: tasks.jsonl}\n")
    return path


def test_show_prints_a_file_that_loads_back(run_file: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["show", str(run_file), "rollout.n=4", "actor.optim.lr=1e-5"])
    assert result.exit_code == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(result.stdout)
    assert load_config(resolved) == load_config(run_file, ["rollout.n=4", "actor.optim.lr=1e-5"])
    assert "policies:" in result.stderr


def test_show_says_what_was_translated(run_file: Path) -> None:
    result = runner.invoke(
        app, ["show", str(run_file), "actor_rollout_ref.rollout.n=4", "actor.use_decoupled_loss=true"]
    )
    assert result.exit_code == 0
    assert "translated: actor_rollout_ref.rollout.n -> rollout.n: 4\n" in result.stderr
    assert "translated: actor.use_decoupled_loss -> actor.proximal: recompute\n" in result.stderr
    assert "actor_rollout_ref" not in result.stdout and "use_decoupled_loss" not in result.stdout


def test_show_reports_problems_without_a_traceback(run_file: Path) -> None:
    result = runner.invoke(app, ["show", str(run_file), "rollout.max_head_offpolicynes=2"])
    assert result.exit_code == 2
    assert "did you mean rollout.max_head_offpolicyness?" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_schema_is_json() -> None:
    result = runner.invoke(app, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "RunConfig"


def test_explain_describes_a_key() -> None:
    result = runner.invoke(app, ["explain", "rollout.n"])
    assert result.exit_code == 0
    assert "integer, at least 1" in result.stdout


def test_explain_knows_names_of_others() -> None:
    assert "verl's name for rollout.n" in runner.invoke(app, ["explain", "actor_rollout_ref.rollout.n"]).stdout
    assert "actor.proximal" in runner.invoke(app, ["explain", "actor.use_decoupled_loss"]).stdout
    assert "no counterpart" in runner.invoke(app, ["explain", "actor.log_agent_stats"]).stdout


def test_explain_of_an_unknown_key_fails_with_the_nearest() -> None:
    result = runner.invoke(app, ["explain", "rollout.temprature"])
    assert result.exit_code == 2
    assert "rollout.temperature" in result.stderr
