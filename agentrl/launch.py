"""What comes before any process of a run starts, and how a person's Ctrl-C reaches it."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from agentrl.ascend import check_ascend_versions, installed_versions
from agentrl.cluster.spec import plugin_paths
from agentrl.config import RunConfig, dump_yaml, update_path
from agentrl.config.gateway_schema import GATEWAY_KEY, is_loopback
from agentrl.config.schema import ModelConfig
from agentrl.device import DeviceError, get_device
from agentrl.observe import create_run_dir, write_environment
from agentrl.record.task import Split
from agentrl.sdk.plugin import PluginError, load_object

T = TypeVar("T")


class Interrupted(Exception):
    """The user or the system asked the run to stop."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run whose parts are all there.

    Attributes:
        run_dir: newly made.
        model_path: a folder, or a hub id.
        plugin_folders: where its processes look for the user's modules.
    """

    config: RunConfig
    run_dir: Path
    model_path: str
    plugin_folders: tuple[str, ...]


def prepare(
    config: RunConfig, plugin_folders: Sequence[str], *, experiment: str, splits: Sequence[Split] = ("train", "val")
) -> Launch:
    """Finds everything a config names and makes the run directory.

    Args:
        splits: which tasks will be needed.

    Raises:
        PluginError, DataError, DeviceError: the config names something that is not there.
        RuntimeError: an event loop is running here.
    """
    from agentrl.models import resolve_model

    _check_no_loop_runs()
    folders = (*plugin_folders, os.getcwd())
    with plugin_paths(folders):
        check_user_code(config, splits)
    _check_renderer(config.model.renderer)
    _check_engine(config)
    _check_gateway(config)
    model_path = resolve_model(config.model.path)
    if config.has_critic and config.critic.path is not None:
        resolve_model(config.critic.path, key="critic.path")
    _check_context(config, model_path)
    if config.model.lora_rank and "train" in splits:
        _check_adapters(config.model, model_path)
    device = get_device(config.trainer.device)
    doubts = _check_ascend() if device.type == "npu" else []
    try:
        run_dir = create_run_dir(config.trainer.output_dir, experiment)
    except OSError as error:
        raise PluginError(f"trainer.output_dir: no run directory can be made there: {error}") from error
    (run_dir / "config.yaml").write_text(dump_yaml(config))
    update = update_path(config) if "train" in splits else None
    write_environment(run_dir, device.names(), plugin_folders=folders, update=update, doubts=doubts)
    return Launch(config, run_dir, model_path, folders)


def _check_ascend() -> list[str]:
    """What is not known to work about the installed versions of the software for NPUs.

    Raises:
        DeviceError: they are known not to work together.
    """
    problems = check_ascend_versions(installed_versions())
    fatal = [problem.text for problem in problems if problem.fatal]
    if fatal:
        raise DeviceError("; ".join(fatal))
    return [problem.text for problem in problems]


def _check_renderer(name: str) -> None:
    if name in ("auto", "default"):
        return
    from renderers.configs import config_from_name

    try:
        config_from_name(name)
    except ValueError as error:
        raise PluginError(f"model.renderer: {error}") from None


def _check_engine(config: RunConfig) -> None:
    engine = config.rollout.engine
    if engine != "torch" and not config.rollout.engine_urls and find_spec(engine) is None:
        raise PluginError(f"rollout.engine is {engine}, which is not installed here: docs/engines.md says how")


def _check_gateway(config: RunConfig) -> None:
    gateway = config.gateway
    if config.plays_outside and not is_loopback(gateway.host) and not os.environ.get(GATEWAY_KEY):
        raise PluginError(
            f"gateway.host is {gateway.host}, which would give episodes to anybody: set the environment variable "
            f"{GATEWAY_KEY} to a key that clients have to send, or gateway.host to 127.0.0.1"
        )
    if not gateway.port:
        return
    from agentrl.gateway.server import listen

    try:
        listen(gateway.host, gateway.port).close()
    except OSError as error:
        raise PluginError(
            f"gateway.port: {gateway.host}:{gateway.port} can't be listened on: {error}: set gateway.port to another "
            "one, or to 0 for one that is free"
        ) from error


def _check_context(config: RunConfig, path: str) -> None:
    """vLLM and SGLang refuse to go beyond the positions that a model was made for."""
    if config.rollout.engine == "torch" or config.rollout.engine_urls:
        return
    from transformers import AutoConfig

    most = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    if most is not None and config.rollout.max_model_len > most:
        raise PluginError(
            f"rollout.max_model_len is {config.rollout.max_model_len}, but the model has {most} positions: set it to "
            f"{most} or less"
        )


def _check_adapters(config: ModelConfig, path: str) -> None:
    from agentrl.lora import check_lora

    try:
        check_lora(config, path)
    except ValueError as error:
        raise PluginError(str(error)) from error


def check_user_code(config: RunConfig, splits: Sequence[Split]) -> None:
    """Finds the agents, the environments, the tasks of these splits, the sampler, and functions of the algorithm that
    are named by a dotted path."""
    from agentrl.rollout.episode import Plugins
    from agentrl.rollout.schedule import TaskSchedule
    from agentrl.rollout.tasks import load_tasks

    Plugins.load(config)
    for key, path in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        ("actor.loss_mode", config.actor.loss_mode),
    ):
        function = load_object(path, key=key) if ":" in path else None
        if function is not None and (inspect.isclass(function) or not callable(function)):
            raise PluginError(f"{key}: {path!r} is a {type(function).__name__}: name a function, or an object to call")
    tasks = {split: load_tasks(config, split) for split in splits}
    if "train" in tasks:
        TaskSchedule.from_config(config, tasks["train"])


def interruptible(work: Coroutine[Any, Any, T], run_dir: Path) -> T:
    """Runs `work` in an event loop of its own; the first SIGINT or SIGTERM cancels it.

    In a thread other than the main one no signal does. Afterwards the signals have the handlers they had before.

    Raises:
        Interrupted: that happened.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    task = loop.create_task(work)

    def cancel() -> None:
        # Once: stopping the processes takes seconds, and a second Ctrl-C must not leave any behind.
        if not task.cancelling():
            task.cancel()

    def stop() -> None:
        if not task.done():
            loop.call_soon_threadsafe(cancel)

    with _handled(stop), runner:
        try:
            return runner.run(_wait_for(task))
        except asyncio.CancelledError:
            raise Interrupted(f"stopped; what there is of the run lies in {run_dir}") from None


async def _wait_for(task: asyncio.Task[T]) -> T:
    return await task


@contextmanager
def _handled(stop: Callable[[], None]) -> Iterator[None]:
    """`stop` handles the signals that ask a program to end. A loop's own handlers would leave the defaults behind them
    in place of the caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


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
