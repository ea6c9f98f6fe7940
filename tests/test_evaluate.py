"""`agentrl eval` with real processes: figures, runs and models, and what it says when it can't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import ConfigError, RunConfig, load_config
from agentrl.evaluate import Evaluation, evaluate, summarise
from agentrl.record import EnvError, load
from agentrl.record.protocols import EvaluatedTask, EvaluationReport
from agentrl.tiny import tiny_model_path

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(CONFIG, [f"trainer.output_dir={folder}", "val.limit=12", *overrides])


def task(name: str, solved: int, judged: int = 2, **failures: int) -> EvaluatedTask:
    rewards = [1.0] * solved + [0.0] * (judged - solved)
    return EvaluatedTask(name, f"{name}-{solved}", judged, solved, rewards, [1] * judged, failures)


def figures(folder: Path, *tasks: EvaluatedTask, k: tuple[int, ...] = (1, 2)) -> Evaluation:
    report = EvaluationReport(list(tasks), 100)
    return summarise(report, config(folder, "val.n=2"), k=k, run_dir=folder, seconds=1.0)


def test_figures_are_over_tasks_with_enough_judged_samples(tmp_path: Path) -> None:
    result = figures(tmp_path, task("a", 2), task("a", 1), task("a", 0, judged=1, env_error=1))
    assert result.pass_at[1].value == pytest.approx((1 + 0.5 + 0) / 3)
    assert result.pass_at[2].value == pytest.approx((1 + 1) / 2)
    assert (result.failed, result.failures, result.by_environment) == (1, {"env_error": 1}, {})
    assert result.reward.value == pytest.approx(0.5)


def test_several_environments_have_figures_of_their_own(tmp_path: Path) -> None:
    result = figures(tmp_path, task("a", 2), task("b", 0))
    assert {name: own[1].value for name, own in result.by_environment.items()} == {"a": 1.0, "b": 0.0}
    assert result.pass_at[1].value == 0.5


def test_without_any_judgement_there_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="not one episode could be judged: 2 env_error"):
        figures(tmp_path, task("a", 0, judged=0, env_error=2))


def test_a_policy_is_measured_and_everything_is_kept(tmp_path: Path) -> None:
    result = evaluate(config(tmp_path, "val.n=2"), k=(1, 2))
    assert len(result.tasks) == 12 and all(task.judged == 2 for task in result.tasks)
    solved = [task.solved for task in result.tasks]
    assert result.pass_at[1].value == pytest.approx(sum(solved) / 24)
    assert result.pass_at[2].value == pytest.approx(sum(map(bool, solved)) / 12)
    assert json.loads((result.run_dir / "evaluation.json").read_text())["pass_at"]["1"]["value"] > 0
    trajectories = list(load(result.run_dir / "trajectories"))
    assert len(trajectories) == 24 and sum(t.reward for t in trajectories) == sum(solved)
    assert result.generated_tokens == sum(t.sampled_tokens for t in trajectories)
    assert load_config(result.run_dir / "config.yaml") == config(tmp_path, "val.n=2")


def test_a_run_is_measured_by_the_policy_it_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(tiny_model_path(), run / "checkpoints" / "step_4" / "model")
    (run / "config.yaml").write_text(f"extends: {CONFIG}\ntrainer: {{output_dir: {tmp_path}, experiment_name: mine}}\n")
    shown = CliRunner().invoke(app, ["eval", str(run), "val.limit=4", "--step", "4"])
    assert shown.exit_code == 0, shown.output
    assert "pass@1" in shown.output and "4 episodes of 4 tasks" in shown.output
    assert str(run / "checkpoints" / "step_4" / "model") in (tmp_path / "mine-eval/latest/config.yaml").read_text()
    missing = CliRunner().invoke(app, ["eval", str(run), "--step", "3"])
    assert (missing.exit_code, "saved steps: 4" in missing.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([str(CONFIG), "--k", "4"], "set val.n to 4"),
        ([str(CONFIG), "--k", "0"], "ask for 1 or more"),
        ([str(CONFIG), "model.path=nowhere"], "model.path"),
        ([str(CONFIG), "--step", "4"], "about the directory of a run"),
        (["/tmp", "--step", "4"], "holds no config.yaml"),
    ],
)
def test_what_can_not_be_measured_is_explained(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())


def test_an_engine_that_can_not_start_ends_the_evaluation_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_path(), broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    result = CliRunner().invoke(app, ["eval", str(CONFIG), f"model.path={broken}", f"trainer.output_dir={tmp_path}"])
    assert result.exit_code == 1, result.output
    assert "the engine-0 process ended with status 3" in result.output


def test_no_samples_are_asked_for_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"set val\.n to 8"):
        evaluate(load_config(CONFIG), k=(1, 8))
    with pytest.raises(ConfigError, match="nobody would play"):
        evaluate(load_config(CONFIG, ["agent.loop=agentrl:OutsideAgent", "env.cls=null"]))
    with pytest.raises(ConfigError, match="names no held-out tasks"):
        evaluate(load_config({"data": {"train": "tasks.jsonl"}}))
