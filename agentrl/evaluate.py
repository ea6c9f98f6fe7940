"""Measuring a policy: what `agentrl eval` does."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.cluster.evaluation import EvaluationHost
from agentrl.config import ConfigError, RunConfig
from agentrl.config.errors import Problem
from agentrl.config.names import OUTSIDE_AGENT
from agentrl.launch import interruptible, prepare
from agentrl.observe.pass_at_k import Estimate, mean, pass_at_k, share
from agentrl.record import EnvError
from agentrl.record.protocols import EvaluatedTask, EvaluationReport

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        model: as the config names it.
        samples: episodes a task.
        pass_at: pass@k by k, over the tasks with at least k judged samples.
        reward: mean reward; tasks count equally.
        by_environment: pass@k by k for each of several environments.
        failed: episodes that infrastructure kept from being judged; in no figure.
        failures: episodes without a judgement, or cut off, by fate.
        seconds: wall time from the start of the processes.
        tasks: task by task.
    """

    run_dir: Path
    model: str
    samples: int
    pass_at: dict[int, Estimate]
    reward: Estimate
    by_environment: dict[str, dict[int, Estimate]]
    failed: int
    failures: dict[str, int]
    generated_tokens: int
    seconds: float
    tasks: list[EvaluatedTask]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "run_dir": str(self.run_dir)}


def evaluate(
    config: RunConfig,
    *,
    k: Sequence[int] = (1,),
    plugin_folders: Sequence[str] = (),
    console: Console | None = None,
) -> Evaluation:
    """Plays each task `val.n` times and estimates pass@k, without training anything.

    Args:
        k: which pass@k; none may be greater than `val.n`.
        plugin_folders: where modules named by the config are looked for, after everything installed and before the
            current folder.

    Raises:
        ConfigError: there are no such tasks, or fewer samples than a k.
        PluginError, DataError, DeviceError: the config names something that is not there; nothing was started.
        AgentRLError: a process failed, or not one task could be judged.
        Interrupted: SIGINT or SIGTERM.
    """
    _check(config, k)
    console = console or Console()
    launch = prepare(config, plugin_folders, experiment=f"{config.trainer.experiment_name}-eval", splits=("val",))
    console.print(f"[bold]agentrl eval[/bold] {launch.run_dir}", highlight=False, soft_wrap=True)
    began = time.monotonic()
    host = EvaluationHost(config, launch.run_dir, launch.model_path, launch.plugin_folders)
    report = interruptible(host.evaluate(console), launch.run_dir)
    evaluation = summarise(report, config, k=k, run_dir=launch.run_dir, seconds=round(time.monotonic() - began, 2))
    (launch.run_dir / EVALUATION_FILE).write_text(json.dumps(evaluation.as_json(), indent=1) + "\n")
    return evaluation


def summarise(
    report: EvaluationReport, config: RunConfig, *, k: Sequence[int], run_dir: Path, seconds: float
) -> Evaluation:
    """The figures of a report.

    Raises:
        EnvError: nothing could be judged.
    """
    judged = [task for task in report.tasks if task.judged]
    failures: Counter[str] = Counter()
    for task in report.tasks:
        failures.update(task.failures)
    if not judged:
        common = ", ".join(f"{count} {fate}" for fate, count in failures.most_common()) or "no tasks"
        raise EnvError(f"not one episode could be judged: {common}; the log is in {run_dir / 'logs'}")
    names = sorted({task.environment for task in judged})
    return Evaluation(
        run_dir=run_dir,
        model=config.model.path,
        samples=config.val.n,
        pass_at=_pass_at(judged, k),
        reward=mean([sum(task.rewards) / task.judged for task in judged]),
        by_environment={name: _pass_at([task for task in judged if task.environment == name], k) for name in names}
        if len(names) > 1
        else {},
        failed=sum(config.val.n - task.judged for task in report.tasks),
        failures=dict(failures),
        generated_tokens=report.generated_tokens,
        seconds=seconds,
        tasks=report.tasks,
    )


def _pass_at(tasks: Sequence[EvaluatedTask], k: Sequence[int]) -> dict[int, Estimate]:
    enough = {size: [task for task in tasks if task.judged >= size] for size in k}
    return {
        size: share([pass_at_k(task.judged, task.solved, size) for task in own]) for size, own in enough.items() if own
    }


def _check(config: RunConfig, k: Sequence[int]) -> None:
    problems = []
    if not config.validates:
        problems.append(Problem("data.val", "names no held-out tasks", "set data.val to the tasks to evaluate on"))
    if config.plays_outside:
        problems.append(
            Problem("agent.loop", f"is {OUTSIDE_AGENT}: nobody would play", "name the agent that is to be measured")
        )
    if min(k) < 1:
        problems.append(Problem("--k", f"is {min(k)}", "ask for 1 or more"))
    if max(k) > config.val.n:
        reason = f"is {config.val.n}: no pass@{max(k)} with so many samples a task"
        problems.append(Problem("val.n", reason, f"set val.n to {max(k)}", others=("--k",)))
    if problems:
        raise ConfigError(problems)
