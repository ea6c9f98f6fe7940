"""Training from Python."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config import load_config
from agentrl.run import RunResult, run
from agentrl.sdk import AgentLoop

__all__ = ["RunResult", "train"]


def train(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    loop: type[AgentLoop] | None = None,
    console: Console | None = None,
) -> RunResult:
    """Runs a training, as `agentrl train` does, and returns when the model is saved.

    Args:
        config: a YAML file, or the same as nested dictionaries.
        overrides: `dotted.key=value`, the last word on their keys.
        loop: the agent; short for `agent.loop` in the config. Must be defined at the top level of its module, and a
            script that trains its own class calls `train` under `if __name__ == "__main__":`.
        console: where progress is shown; default: standard output.

    Raises:
        ConfigError: what is wrong with the configuration, all of it at once.
        PluginError, DataError, DeviceError: something it names is not there.
        AgentRLError: the run failed; `ProcessFailed` carries the log of the process that did.
        Interrupted: SIGINT or SIGTERM.
        RuntimeError: an event loop is running here; the message says what to do.
    """
    paths = [str(Path(config).resolve().parent)] if isinstance(config, str | Path) else []
    if loop is not None:
        module, folder = _module_of(loop)
        overrides = [f"agent.loop={module}:{loop.__qualname__}", *overrides]
        paths.append(folder)
    return run(load_config(config, overrides), plugin_folders=paths, console=console)


def _module_of(cls: type) -> tuple[str, str]:
    """The name under which another process can import a class's module, and the folder it is found from."""
    file = Path(inspect.getfile(cls)).resolve()
    name = cls.__module__
    if name == "__main__":
        spec = sys.modules["__main__"].__spec__
        name = file.stem if spec is None else spec.name
    return name, str(file.parents[name.count(".") + (file.stem == "__init__")])
