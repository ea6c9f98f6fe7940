"""Trajectories on disk: one JSON object a line, zstandard-compressed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import zstandard

from agentrl.record.codec import from_json, to_json
from agentrl.record.trajectory import IDS, LOGPROBS, MASK, Trajectory


class TrajectoryWriter:
    """Writes `trajectories/<name>.jsonl.zst`, a new file every so many steps, and keeps the newest ones.

    Each `append` ends a compressed block, so that a file is readable up to its last whole block even if the
    process was killed.
    """

    def __init__(self, directory: Path, *, per_file: int = 4096, keep_files: int = 64) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._per_file = per_file
        self._keep_files = keep_files
        self._count = 0

    def append(self, trajectories: list[Trajectory], prefix: str = "train") -> None:
        path = self._directory / f"{prefix}-{self._count // self._per_file:05d}.jsonl.zst"
        lines = b"".join(to_json(trajectory) + b"\n" for trajectory in trajectories)
        with path.open("ab") as file:
            file.write(zstandard.ZstdCompressor(level=3).compress(lines))
        self._count += len(trajectories)
        for old in sorted(self._directory.glob(f"{prefix}-*.jsonl.zst"))[: -self._keep_files]:
            old.unlink()


def load(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a `.jsonl.zst` file, or of all those in a directory, in the order written.

    Raises:
        FileNotFoundError: nothing there.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl.zst")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no .jsonl.zst files in {path}")
    for file in files:
        with file.open("rb") as raw:
            reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            for line in io.TextIOWrapper(reader, encoding="utf-8"):
                yield _with_dtypes(from_json(line, Trajectory))


def _with_dtypes(trajectory: Trajectory) -> Trajectory:
    for branch in trajectory.branches:
        branch.token_ids = branch.token_ids.astype(IDS)
        branch.loss_mask = branch.loss_mask.astype(MASK)
        branch.logprobs = branch.logprobs.astype(LOGPROBS)
        branch.versions = branch.versions.astype(IDS)
    return trajectory
