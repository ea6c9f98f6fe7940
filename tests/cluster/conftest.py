"""Addresses of sockets, and a look at the processes and folders that a run may leave."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address of its own; pytest's folders are too long for one."""
    with tempfile.TemporaryDirectory(prefix="rpc-") as folder:
        yield f"ipc://{folder}/s"


@pytest.fixture
def run_folders() -> Callable[[int], list[Path]]:
    """`run_folders(pid)`: what a supervisor with that pid has in shared memory and the temporary folder."""

    def find(pid: int) -> list[Path]:
        roots = [Path("/dev/shm"), Path(tempfile.gettempdir())]
        return [path for root in roots if root.is_dir() for path in root.glob(f"agentrl-{pid}-*")]

    return find
