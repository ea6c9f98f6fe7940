"""`agentrl eval`: how good is a policy?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.config import ConfigError
from agentrl.config.errors import Problem
from agentrl.evaluate import Evaluation
from agentrl.observe.pass_at_k import Estimate


def run_overrides(run_dir: Path, step: int | None) -> tuple[Path, list[str]]:
    """The config of a run, and the override that makes it use the policy which that run has trained.

    Raises:
        ConfigError: the folder is no run, or has no such policy.
    """
    config = run_dir / "config.yaml"
    saved = {int(path.parent.name.removeprefix("step_")): path for path in run_dir.glob("checkpoints/step_*/model")}
    if not config.is_file():
        raise ConfigError([Problem(str(run_dir), "holds no config.yaml", "name a YAML file or a run directory")])
    if step is not None:
        if step not in saved:
            there = ", ".join(map(str, sorted(saved))) or "none (set trainer.save_freq)"
            raise ConfigError([Problem("--step", f"{run_dir} has no policy of step {step}", f"saved steps: {there}")])
        model = saved[step]
    elif (run_dir / "model").is_dir():
        model = run_dir / "model"
    elif saved:
        model = saved[max(saved)]
    else:
        raise ConfigError(
            [Problem(str(run_dir), "holds no trained policy", "let the run end, or set trainer.save_freq")]
        )
    return config, [f"model.path={model.resolve()}"]


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """The figures as a table, and where the rest is."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "estimate", "95% interval", "tasks"):
        table.add_column(column, justify="left" if not column else "right")
    for k, estimate in evaluation.pass_at.items():
        table.add_row(f"pass@{k}", *_cells(estimate))
    for name, estimates in evaluation.by_environment.items():
        for k, estimate in estimates.items():
            table.add_row(f"pass@{k} {name}", *_cells(estimate))
    table.add_row("reward", *_cells(evaluation.reward))
    console.print(table)
    judged = sum(task.judged for task in evaluation.tasks)
    console.print(
        f"{judged} episodes of {len(evaluation.tasks)} tasks, {evaluation.samples} a task, "
        f"{evaluation.seconds:.0f} s, {evaluation.generated_tokens} tokens",
        highlight=False,
    )
    if evaluation.failures:
        failures = ", ".join(f"{count} {fate}" for fate, count in sorted(evaluation.failures.items()))
        console.print(f"not ended well: {failures}; {evaluation.failed} left out of all figures", highlight=False)
    console.print(f"model: {evaluation.model}", highlight=False, soft_wrap=True)
    console.print(f"everything: {evaluation.run_dir}", highlight=False, soft_wrap=True)


def _cells(estimate: Estimate) -> tuple[str, str, str]:
    return f"{estimate.value:.3f}", f"{estimate.low:.3f} - {estimate.high:.3f}", str(estimate.tasks)
