"""One run, from a checked config to a trained model: what `agentrl train` and `agentrl.train` do."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.cluster.local import LocalHost, RunState
from agentrl.cluster.spec import plugin_paths
from agentrl.config import RunConfig, config_notes, dump_yaml
from agentrl.device import get_device
from agentrl.observe import Progress, ProgressView, create_run_dir, progress_view, write_environment
from agentrl.sdk.plugin import PluginError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Interrupted(Exception):
    """The user or the system asked the run to stop."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run.

    Attributes:
        accuracy_before, accuracy_after: on the held-out tasks; None if there are none.
        fates: ended episodes by fate.
        problem: why training ended before its time, if it did; the model is saved all the same.
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
    _check_no_loop_runs()
    console = console or Console()
    folders = (*plugin_folders, os.getcwd())
    device = get_device(config.trainer.device)
    model_path = resolve_model(config.model.path)
    with plugin_paths(folders):
        check_user_code(config)
    try:
        run_dir = create_run_dir(config.trainer.output_dir, config.trainer.experiment_name)
    except OSError as error:
        raise PluginError(f"trainer.output_dir: no run directory can be made there: {error}") from error
    (run_dir / "config.yaml").write_text(dump_yaml(config))
    write_environment(run_dir, [device.type])
    console.print(f"[bold]agentrl[/bold] {run_dir}")
    for note in config_notes(config):
        console.print(note, style="dim", highlight=False)
    return asyncio.run(_supervise(LocalHost(config, run_dir, model_path, folders), config, console))


def _check_no_loop_runs() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "a run starts its own event loop, but one is running here. In a notebook or in async code use `await "
        "asyncio.to_thread(train, ...)`; in a script call `train` under `if __name__ == '__main__':`, since the run's "
        "processes import the script"
    )


def resolve_model(path: str) -> str:
    """The folder of a model, or a hub id as it is.

    Raises:
        PluginError: it looks like a folder, but is not there or holds no model.
    """
    from agentrl.tiny import TINY_MODEL, tiny_model_path

    if path == TINY_MODEL:
        return str(tiny_model_path())
    folder = Path(path)
    if (folder / "config.json").is_file() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise PluginError(f"model.path: {path} holds no tokenizer: save it there (tokenizer.save_pretrained)")
    hub_id = path.count("/") == 1 and path[0] not in "./~" and not folder.parent.is_dir()
    if hub_id or (folder / "config.json").is_file():
        return path
    raise PluginError(
        f"model.path: {path!r} is no folder with a config.json, no hub id (owner/name), and not {TINY_MODEL!r}, "
        "the bundled model"
    )


def check_user_code(config: RunConfig) -> None:
    """Finds the agent, the environment and the tasks before any process starts."""
    from agentrl.rollout.episode import Plugins
    from agentrl.rollout.tasks import load_tasks

    Plugins.load(config)
    load_tasks(config.data, "train")
    load_tasks(config.data, "val")


async def _supervise(host: LocalHost, config: RunConfig, console: Console) -> RunResult:
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_watch(host, config, progress_view(console)))

    def stop() -> None:
        # Once: stopping the processes takes seconds, and a second Ctrl-C must not leave any behind.
        if not work.cancelling():
            work.cancel()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        raise Interrupted(f"stopped; what there is of the run lies in {host.run_dir}") from None


async def _watch(host: LocalHost, config: RunConfig, view: ProgressView) -> RunResult:
    began = time.monotonic()
    step_seconds: list[float] = []
    last: RunState | None = None
    try:
        view.update(Progress(phase="starting the processes"))
        async with host:
            async for state in host.states():
                last = state
                step_seconds += [state.trainer.metrics["time/step"]] if state.trainer.metrics else []
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
        problem=last.trainer.problem,
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
