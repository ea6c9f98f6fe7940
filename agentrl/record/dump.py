"""Trajectories on disk: one JSON object a line, zstandard-compressed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import zstandard

from agentrl.record.codec import from_json, to_json
from agentrl.record.trajectory import IDS, LOGPROBS, MASK, Trajectory

_CHUNK = 1 << 20


class TrajectoryWriter:
    """Writes `<prefix>-<number>.jsonl.zst`, a new file every so many trajectories, and keeps the newest files.

    Each `append` ends a compressed block, so that a file is readable up to its last whole block even if the
    process was killed.
    """

    def __init__(self, directory: Path, prefix: str, *, per_file: int = 4096, keep_files: int = 64) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._prefix = prefix
        self._per_file = per_file
        self._keep_files = keep_files
        self._count = 0

    def append(self, trajectories: list[Trajectory]) -> None:
        """Adds trajectories; they are on disk when it returns."""
        path = self._directory / f"{self._prefix}-{self._count // self._per_file:05d}.jsonl.zst"
        lines = b"".join(to_json(trajectory) + b"\n" for trajectory in trajectories)
        with path.open("ab") as file:
            file.write(zstandard.ZstdCompressor(level=3).compress(lines))
        self._count += len(trajectories)
        for old in sorted(self._directory.glob(f"{self._prefix}-*.jsonl.zst"))[: -self._keep_files]:
            old.unlink()


def load(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a `.jsonl.zst` file, or of all those in a directory, in the order written.

    A block that was cut off at the end of a file is left out.

    Raises:
        FileNotFoundError: nothing there.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl.zst")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no .jsonl.zst files in {path}")
    for file in files:
        for block in _blocks(file):
            for line in block.splitlines():
                yield _with_dtypes(from_json(line, Trajectory))


def _blocks(file: Path) -> Iterator[bytes]:
    """The whole compressed blocks of a file, one at a time."""
    with file.open("rb") as raw:
        rest = b""
        while True:
            block = zstandard.ZstdDecompressor().decompressobj()
            parts = []
            while not block.eof:
                rest = rest or raw.read(_CHUNK)
                if not rest:
                    return
                parts.append(block.decompress(rest))
                rest = block.unused_data
            yield b"".join(parts)


def _with_dtypes(trajectory: Trajectory) -> Trajectory:
    for branch in trajectory.branches:
        branch.token_ids = branch.token_ids.astype(IDS)
        branch.loss_mask = branch.loss_mask.astype(MASK)
        branch.logprobs = branch.logprobs.astype(LOGPROBS)
        branch.versions = branch.versions.astype(IDS)
    return trajectory
