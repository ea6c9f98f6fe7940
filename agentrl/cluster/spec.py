"""What a process of a run needs to know to take its part."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run, as its supervisor describes it to its processes.

    Attributes:
        config: the resolved configuration, as JSON values.
        model_path: where the model's files are.
        sockets: folder of the processes' sockets.
        segments: folder of the shared memory segments.
        plugin_paths: folders in which the user's own modules are looked for, after everything installed.
    """

    config: dict[str, Any]
    model_path: str
    run_dir: str
    sockets: str
    segments: str
    plugin_paths: tuple[str, ...]
    engines: int

    def run_config(self) -> RunConfig:
        return RunConfig.model_validate(self.config)

    def address(self, role: str) -> str:
        """Where the process with that role is reached."""
        return f"ipc://{self.sockets}/{role}"

    def engine_roles(self) -> list[str]:
        return [f"engine-{index}" for index in range(self.engines)]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        values = json.loads(path.read_text())
        return cls(**{**values, "plugin_paths": tuple(values["plugin_paths"])})


@contextmanager
def plugin_paths(paths: Iterable[str]) -> Iterator[None]:
    """Makes modules in these folders importable for a while; whatever is installed has precedence."""
    added = [path for path in dict.fromkeys(paths) if path not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        sys.path[:] = [path for path in sys.path if path not in added]
