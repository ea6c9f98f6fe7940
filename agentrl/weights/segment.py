"""Shared memory as files: mapped by sender and receivers, removed with their folder whatever happens."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def shared_memory_root(needed: int) -> Path:
    """The folder for segments: in memory where the system has such a place with `needed` bytes free, else on disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > needed:
        return memory
    return Path(tempfile.gettempdir())


class Segment:
    """A file of fixed size, mapped into memory."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        # Here, so that a supervisor, which only asks for the folder, starts without torch.
        import torch

        self.path = path
        self.view = memoryview(mapping)
        self.tensor: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, path: Path, size: int) -> Segment:
        """A new segment of `size` bytes, all of them reserved.

        Raises:
            OSError: there is no room for it.
        """
        with path.open("w+b") as file:
            # Without room a sparse file would end the process at its first write, with no error to catch.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return cls(path, mmap.mmap(file.fileno(), size))

    @classmethod
    def attach(cls, path: str) -> Segment:
        """The segment somebody else created."""
        with open(path, "r+b") as file:
            return cls(Path(path), mmap.mmap(file.fileno(), 0))
