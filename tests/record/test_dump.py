"""Trajectories on disk: round trip, a file cut off by a crash, retention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentrl.record import Branch, Trajectory, TrajectoryWriter, Turn, load
from agentrl.record.trajectory import IDS, LOGPROBS, MASK


def trajectory(number: int, tokens: int = 4) -> Trajectory:
    branch = Branch.context(np.arange(tokens), [Turn(1, tokens, 1.0, "stop")])
    branch.loss_mask[1:] = 1
    branch.logprobs[1:] = -0.1 * number - 1e-7
    branch.versions[1:] = number
    return Trajectory(f"g{number}.0", f"g{number}", "train-0", 0, 0, [branch], float(number), info={"number": number})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_comes_back_with_the_types_of_the_record(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, "train")
    written = [trajectory(number) for number in range(5)]
    writer.append(written[:2])
    writer.append(written[2:])
    read = list(load(tmp_path))
    assert [t.episode_id for t in read] == [t.episode_id for t in written]
    for one, other in zip(read, written, strict=True):
        assert (one.reward, one.info, one.status, one.branches[0].turns) == (
            other.reward,
            other.info,
            other.status,
            other.branches[0].turns,
        )
        for name, dtype in (("token_ids", IDS), ("loss_mask", MASK), ("logprobs", LOGPROBS), ("versions", IDS)):
            copy, array = getattr(one.branches[0], name), getattr(other.branches[0], name)
            assert copy.dtype == dtype
            np.testing.assert_array_equal(copy, array)


def test_a_file_cut_off_anywhere_is_readable_up_to_its_last_whole_block(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, "train")
    writer.append([trajectory(0), trajectory(1)])
    (path,) = tmp_path.iterdir()
    whole = path.stat().st_size
    writer.append([trajectory(number, tokens=3000) for number in (2, 3)])
    content = path.read_bytes()
    cut = tmp_path / "cut.jsonl.zst"
    for size in {whole, whole + 1, whole + 7, (whole + len(content)) // 2, len(content) - 1}:
        cut.write_bytes(content[:size])
        assert [t.episode_id for t in load(cut)] == ["g0.0", "g1.0"], size
    cut.write_bytes(content[: whole - 1])
    assert list(load(cut)) == []


def test_a_long_file_is_read_block_by_block(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, "train")
    for number in range(40):
        writer.append([trajectory(number, tokens=50)] * 3)
    assert [t.reward for t in load(tmp_path)] == [float(number) for number in range(40) for _ in range(3)]


def test_the_newest_files_are_kept(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, "train", per_file=2, keep_files=2)
    for number in range(7):
        writer.append([trajectory(number)])
    assert names(tmp_path) == ["train-00002.jsonl.zst", "train-00003.jsonl.zst"]
    assert [t.reward for t in load(tmp_path)] == [4.0, 5.0, 6.0]


def test_retention_leaves_the_files_of_others_alone(tmp_path: Path) -> None:
    TrajectoryWriter(tmp_path, "val").append([trajectory(9)])
    writer = TrajectoryWriter(tmp_path, "train", per_file=1, keep_files=1)
    writer.append([trajectory(0)])
    writer.append([trajectory(1)])
    assert names(tmp_path) == ["train-00001.jsonl.zst", "val-00000.jsonl.zst"]


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl\.zst files"):
        list(load(tmp_path))
