"""`metrics.jsonl` and TensorBoard hold what was written, and survive what runs go through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.observe import STEP_KEYS, MetricsWriter


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a strict reader, which refuses NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"step": 1, "reward/mean": 0.5, "note": "first"})
        assert rows(tmp_path) == [{"step": 1, "reward/mean": 0.5, "note": "first"}]
        writer.write({"step": 2, "reward/mean": None})
        assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert not (tmp_path / "tensorboard").exists()


def test_keys_have_one_order_however_they_come(tmp_path: Path) -> None:
    values = {key: float(index) for index, key in enumerate(STEP_KEYS)} | {"step": 1, "val/accuracy": 0.1, "a": 1}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(values)
        writer.write(dict(reversed(values.items())))
    first, second = rows(tmp_path)
    assert list(first) == list(second) == [*STEP_KEYS, "a", "val/accuracy"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"step": 1, "a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1e308})
    assert rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 1e308}]


def test_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    row: dict[str, Any] = {"step": np.int64(3), "a": np.float32(0.5), "b": np.float64("nan"), "c": True}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row)
    assert rows(tmp_path) == [{"step": 3, "a": 0.5, "b": None, "c": True}]


def test_what_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    row: dict[str, Any] = {"step": 1, "actor/loss": [0.5]}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(TypeError, match="metric actor/loss is a list"):
            writer.write(row)
        with pytest.raises(ValueError, match="needs an integer 'step'; got None"):
            writer.write({"reward/mean": 0.5})
    assert rows(tmp_path) == [], "nothing half-written"


def test_a_line_that_a_crash_cut_off_is_dropped_on_reopening(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rewa')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"step": 2})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "reward/mean": step / 4, "queue/size": step, "note": "text", "val": None})
        written_before_close = _scalars(tmp_path)
    assert (
        written_before_close
        == _scalars(tmp_path)
        == {
            "reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)],
            "queue/size": [(1, 1.0), (2, 2.0), (3, 3.0)],
        }
    )


def _scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_writing_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from agentrl.observe import MetricsWriter\n"
        "assert 'tensorboard' not in sys.modules\n"
        "with MetricsWriter(pathlib.Path(sys.argv[1])) as writer: writer.write({'step': 1, 'a': 1.0})\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert rows(tmp_path) == [{"step": 1, "a": 1.0}]
