"""SIGINT and SIGTERM at any moment of a run's life: it ends in time and in order, and leaves what it had, readable."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.runs import (
    MATH,
    SMALL,
    assert_every_episode_has_one_fate,
    children_of,
    engine_of,
    finish,
    kill_engine,
    started,
)

Folders = Callable[[int], list[Path]]
RUN = (*SMALL, "trainer.total_steps=6", "trainer.test_freq=2", "trainer.save_freq=2")
LONGEST = 20.0
"""Seconds that such a run takes at most before its last moments; a signal later than its end finds nobody."""
RANDOM = random.Random(20)
MOMENTS = [(RANDOM.uniform(0.0, LONGEST), number % 4 == 3) for number in range(12)]


def wait_until(process: subprocess.Popen[str], moment: float, *, engine_dies: bool) -> None:
    """Sleeps until that many seconds after the start; the engine is killed less than two seconds before."""
    began = time.monotonic()
    if engine_dies:
        time.sleep(max(0.0, moment - RANDOM.uniform(0.0, 2.0)))
        if engine_of(process) is not None:
            kill_engine(process)
    time.sleep(max(0.0, moment - (time.monotonic() - began)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "moment", "engine_dies"), [(number, *moment) for number, moment in enumerate(MOMENTS)]
)
def test_a_signal_at_any_moment_ends_the_run_in_order(
    tmp_path: Path, run_folders: Folders, number: int, moment: float, engine_dies: bool
) -> None:
    with started(MATH, tmp_path, *RUN) as process:
        wait_until(process, moment, engine_dies=engine_dies)
        children = children_of(process)
        process.send_signal(signal.SIGINT if number % 2 else signal.SIGTERM)
        began = time.monotonic()
        run = finish(process, tmp_path, timeout=30)
        assert time.monotonic() - began < 5
    # While Python and the command line still start, a signal ends them as it ends any program.
    early = not list(tmp_path.glob("runs/*/*/logs"))
    assert early or (run.status in (0, 130) and "Traceback" not in run.err), run.err
    _, alive = psutil.wait_procs(children, timeout=0.5)
    assert alive == []
    assert run_folders(run.pid) == []
    for name in ("metrics.jsonl", "fates.jsonl"):
        for path in tmp_path.glob(f"runs/*/*/{name}"):
            assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
    if (run.folder / "fates.jsonl").exists():
        assert_every_episode_has_one_fate(run)
