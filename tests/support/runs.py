"""Whole runs through the command line, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MATH = Path(__file__).parents[2] / "examples" / "math.yaml"
SMALL = (
    "rollout.n=4",
    "rollout.max_concurrent=32",
    "rollout.filter_zero_variance=true",
    "async_training.require_batches=1",
    "actor.ppo_mini_batch_size=2",
    "data.train_args.count=256",
    "data.val_args.count=8",
)
AGENT = Path(sys.executable).with_name("agentrl")


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str
    folder: Path
    pid: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "actor/loss" in row]

    @property
    def fates(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "fates.jsonl").read_text().splitlines()]


@contextmanager
def started(file: Path, folder: Path, *overrides: str, command_name: str = "train") -> Iterator[subprocess.Popen[str]]:
    """`agentrl train` on its way; killed at the end, if it still runs."""
    command = [str(AGENT), command_name, str(file), "trainer.output_dir=runs", "trainer.device=cpu", *overrides]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], folder: Path, timeout: float = 120) -> Finished:
    out, err = process.communicate(timeout=timeout)
    latest = next(iter(folder.glob("runs/*/latest")), folder)
    return Finished(process.returncode, out, err, latest.resolve(), process.pid)


def train(file: Path, folder: Path, *overrides: str) -> Finished:
    with started(file, folder, *overrides) as process:
        return finish(process, folder)


def until_step(process: subprocess.Popen[str], number: int) -> None:
    """Reads the run's output until that training step is done."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {number}/"):
            return
    raise AssertionError(f"the run ended early: {process.stderr and process.stderr.read()}")


def assert_every_episode_has_one_fate(run: Finished) -> None:
    """Episodes are `g<group>.<member>`, dispatched in whole groups of four."""
    ids = [fate["episode_id"] for fate in run.fates]
    assert len(ids) == len(set(ids))
    groups = Counter(episode.split(".")[0] for episode in ids)
    assert groups == {f"g{number}": 4 for number in range(len(groups))}


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes below it."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_of(process: subprocess.Popen[str], name: str = "engine-0") -> psutil.Process | None:
    """The process of an engine now; None while there is none."""
    for child in children_of(process):
        try:
            if name in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def kill_engine(process: subprocess.Popen[str], name: str = "engine-0") -> None:
    """Kills it as the system would for want of memory; waits for it first, if it is about to be started."""
    while (engine := engine_of(process, name)) is None:
        assert process.poll() is None, "the run has ended"
        time.sleep(0.02)
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
