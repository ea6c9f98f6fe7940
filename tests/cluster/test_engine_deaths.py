"""Engines of a real run are killed: they come back with the current weights, and what was lost is played again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrl.record import load
from agentrl.tiny import tiny_model_path
from tests.support.runs import (
    MATH,
    SMALL,
    Finished,
    assert_every_episode_has_one_fate,
    children_of,
    engine_of,
    finish,
    kill_engine,
    started,
    until_step,
)

Folders = Callable[[int], list[Path]]
QUICK = (*SMALL, "trainer.val_before_train=false", "trainer.total_steps=8")


def assert_it_went_on(run: Finished, deaths: int) -> None:
    """All steps were taken, nothing was counted twice or never, and the log says what happened."""
    assert run.status == 0, run.err
    assert [row["step"] for row in run.steps] == list(range(1, 9))
    assert run.err.count("the engine-") == deaths and "is started again" in run.err
    assert "Traceback" not in run.err
    assert_every_episode_has_one_fate(run)
    summary = re.search(r"^(\d+) episodes: (.*)$", run.out, re.MULTILINE)
    assert summary is not None and int(summary[1]) == len(run.fates)
    for row in run.steps:
        assert row["throughput/rollout_tokens_per_s"] >= 0 and row["overlap/engine_tokens"] >= 0
        assert 0 <= row["staleness/lag_max"] <= 2 and 0 <= row["idle/engine"] <= 1
    versions = [row["policy_version"] for row in run.steps]
    assert versions == sorted(versions)


def assert_nothing_is_left(run: Finished, children: list[psutil.Process], run_folders: Folders) -> None:
    _, alive = psutil.wait_procs(children, timeout=0.5)
    assert alive == []
    assert run_folders(run.pid) == []


def test_a_run_goes_on_when_its_only_engine_is_killed(tmp_path: Path, run_folders: Folders) -> None:
    with started(MATH, tmp_path, *QUICK) as process:
        until_step(process, 2)
        kill_engine(process)
        until_step(process, 6)
        children = children_of(process)
        run = finish(process, tmp_path)
    assert_it_went_on(run, deaths=1)
    assert_nothing_is_left(run, children, run_folders)


@pytest.mark.full
def test_without_any_restart_left_the_end_of_the_engines_log_is_the_error(tmp_path: Path, run_folders: Folders) -> None:
    overrides = (*QUICK, "trainer.total_steps=1000", "rollout.max_engine_restarts=0")
    with started(MATH, tmp_path, *overrides) as process:
        until_step(process, 1)
        children = children_of(process)
        kill_engine(process)
        run = finish(process, tmp_path, timeout=30)
    assert run.status == 1
    assert re.search("error: the engine-0 process was ended by SIGKILL .*; the end of ", run.err)
    assert "Traceback" not in run.err
    assert_nothing_is_left(run, children, run_folders)
    assert_every_episode_has_one_fate(run)


@pytest.mark.full
@pytest.mark.parametrize("sync", [1, 2])
@pytest.mark.parametrize("partial", ["true", "false"])
def test_an_engine_may_be_killed_twice(tmp_path: Path, partial: str, sync: int) -> None:
    modes = (f"async_training.partial_rollout={partial}", f"async_training.trigger_parameter_sync_step={sync}")
    with started(MATH, tmp_path, *QUICK, *modes) as process:
        until_step(process, 1)
        kill_engine(process)
        until_step(process, 5)
        kill_engine(process)
        run = finish(process, tmp_path)
    assert_it_went_on(run, deaths=2)
    fates = {row["fate"] for row in run.fates}
    assert fates <= {"trained", "filtered", "cancelled", "group_incomplete", "truncated"}, fates
    if partial == "false":
        for trajectory in load(run.folder / "trajectories"):
            versions = {int(v) for branch in trajectory.branches for v in branch.trained_versions}
            assert len(versions) == 1, "no episode mixes versions"


@pytest.mark.full
def test_an_engine_killed_again_while_it_starts_and_once_too_often(tmp_path: Path, run_folders: Folders) -> None:
    overrides = (*QUICK, "trainer.total_steps=1000", "rollout.max_engine_restarts=2")
    with started(MATH, tmp_path, *overrides) as process:
        until_step(process, 1)
        children = children_of(process)
        for _ in range(3):
            kill_engine(process)
            time.sleep(0.5)
        run = finish(process, tmp_path, timeout=60)
    assert run.status == 1
    assert run.err.count("is started again") == 2
    assert "error: the engine-0 process was ended by SIGKILL" in run.err
    assert_nothing_is_left(run, children, run_folders)
    assert_every_episode_has_one_fate(run)


@pytest.mark.full
@pytest.mark.parametrize("partial", ["true", "false"])
def test_an_engine_killed_in_the_middle_of_a_publication(tmp_path: Path, partial: str) -> None:
    """Stopped, it answers no step of one; the trainer gets as far as that with what is queued."""
    with started(MATH, tmp_path, *QUICK, f"async_training.partial_rollout={partial}") as process:
        until_step(process, 2)
        engine = engine_of(process)
        assert engine is not None
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(3)
        kill_engine(process)
        run = finish(process, tmp_path)
    assert_it_went_on(run, deaths=1)


@pytest.mark.full
@pytest.mark.parametrize("restarts", [0, 3])
def test_one_of_two_engines_is_killed(tmp_path: Path, restarts: int) -> None:
    overrides = (*QUICK, "rollout.n_gpus_per_node=2", f"rollout.max_engine_restarts={restarts}")
    with started(MATH, tmp_path, *overrides) as process:
        until_step(process, 2)
        kill_engine(process, "engine-1")
        run = finish(process, tmp_path)
    if restarts:
        assert_it_went_on(run, deaths=1)
    else:
        assert run.status == 0 and re.search("was ended by SIGKILL .* and will be missed", run.err)
        assert len(run.steps) == 8
        assert_every_episode_has_one_fate(run)


@pytest.mark.full
def test_an_engine_that_cannot_start_again_is_not_tried_again(tmp_path: Path, run_folders: Folders) -> None:
    model = shutil.copytree(tiny_model_path(), tmp_path / "model")
    overrides = (*QUICK, f"model.path={model}", "trainer.total_steps=1000")
    with started(MATH, tmp_path, *overrides) as process:
        until_step(process, 1)
        children = children_of(process)
        for file in model.glob("*.safetensors"):
            file.unlink()
        kill_engine(process)
        run = finish(process, tmp_path, timeout=60)
    assert run.status == 1
    assert "error: the engine-0 process ended with status 3" in run.err
    assert "the engine could not be started" in run.err
    assert_nothing_is_left(run, children, run_folders)
