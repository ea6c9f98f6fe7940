"""One run, from a checked config to a trained model: what `agentrl train` and `agentrl.train` do."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.cluster.local import LocalHost, RunState
from agentrl.config import RunConfig, config_notes
from agentrl.launch import Interrupted, interruptible, prepare
from agentrl.observe import Progress, ProgressView, progress_view

__all__ = ["Interrupted", "RunResult", "run"]

_UNSEEN_END = "the trainer ended before it could say how the run went: see logs/trainer.log in the run directory"


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run.

    Attributes:
        accuracy_before, accuracy_after: on the held-out tasks; None if there are none.
        fates: ended episodes by fate.
        problem: why training ended before its time or was in vain, if so; the model is saved all the same.
    """

    run_dir: Path
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    dispatched: int
    fates: dict[str, int]
    seconds: float
    problem: str = ""


def run(config: RunConfig, *, plugin_folders: Sequence[str] = (), console: Console | None = None) -> RunResult:
    """Trains as `config` says and returns when the model is saved.

    Args:
        plugin_folders: where modules named by the config are looked for, after everything installed and before the
            current folder.

    Raises:
        PluginError, DataError, DeviceError: the config names something that is not there; nothing was started.
        AgentRLError: the run failed; `ProcessFailed` carries the log of the process that did.
        Interrupted: SIGINT or SIGTERM.
    """
    console = console or Console()
    launch = prepare(config, plugin_folders, experiment=config.trainer.experiment_name)
    console.print(f"[bold]agentrl[/bold] {launch.run_dir}")
    for note in config_notes(config):
        console.print(note, style="dim", highlight=False)
    host = LocalHost(config, launch.run_dir, launch.model_path, launch.plugin_folders)
    return interruptible(_watch(host, config, progress_view(console)), launch.run_dir)


async def _watch(host: LocalHost, config: RunConfig, view: ProgressView) -> RunResult:
    began = time.monotonic()
    step_seconds: list[float] = []
    warned = Counter[str]()
    last: RunState | None = None
    try:
        view.update(Progress(phase="starting the processes"))
        async with host:
            async for state in host.states():
                if state.rollout.gateway and (last is None or not last.rollout.gateway):
                    view.message(f"agents get episodes at {state.rollout.gateway}/agentrl/episodes")
                last = state
                step_seconds += [state.trainer.metrics["time/step"]] if state.trainer.metrics else []
                if warning := state.trainer.warning:
                    # Told again each time it has happened twice as often.
                    warned[warning] += 1
                    if warned[warning].bit_count() == 1:
                        step = int(state.trainer.metrics["step"])
                        view.message(f"warning: training step {step} skipped an optimiser step: {warning}")
                view.update(_progress(state, config, time.monotonic() - began, step_seconds[-10:]))
            await host.wait_for_trainer()
    finally:
        view.close()
    assert last is not None
    return RunResult(
        run_dir=host.run_dir,
        steps=last.trainer.step,
        accuracy_before=last.trainer.val_first,
        accuracy_after=last.trainer.val_last,
        dispatched=last.rollout.dispatched,
        fates=last.rollout.fates,
        seconds=time.monotonic() - began,
        problem=last.trainer.problem if last.trainer.phase == "done" else _UNSEEN_END,
    )


def _progress(state: RunState, config: RunConfig, elapsed: float, step_seconds: list[float]) -> Progress:
    trainer, rollout, row = state.trainer, state.rollout, state.trainer.metrics
    eta = None
    if step_seconds and trainer.total_steps:
        eta = statistics.fmean(step_seconds) * (trainer.total_steps - trainer.step)
    waits = {
        "waiting for a batch": rollout.waiting_for,
        "publishing weights": f"{rollout.engines} engines to take version {trainer.version + 1}",
        "validating": "the held-out episodes",
    }
    waiting_for = waits.get(trainer.phase)
    lag_max = row.get("staleness/lag_max")
    return Progress(
        phase=trainer.phase,
        step=int(row["step"]) if row else trainer.step,
        total_steps=trainer.total_steps,
        policy_version=trainer.version,
        reward_mean=row.get("reward/mean"),
        val_accuracy=trainer.val_last,
        val_accuracy_first=trainer.val_first,
        lag_max=None if lag_max is None else int(lag_max),
        lag_mean=row.get("staleness/lag_mean"),
        train_tokens_per_s=row.get("throughput/train_tokens_per_s"),
        rollout_tokens_per_s=row.get("throughput/rollout_tokens_per_s"),
        idle_trainer=row.get("idle/trainer"),
        idle_engine=row.get("idle/engine"),
        queue_size=rollout.queued_groups,
        in_flight=rollout.in_flight,
        running=rollout.running_episodes,
        capacity=config.rollout.max_concurrent,
        elapsed=elapsed,
        eta=eta,
        waiting_for=waiting_for,
        waiting_seconds=trainer.phase_seconds if waiting_for else None,
    )
