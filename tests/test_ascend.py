"""Known-good versions pass, known-bad ones are refused with what to install, and of unknown ones there is a warning."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.ascend import (
    COMBINATIONS,
    ENGINE_ENVIRONMENT,
    PACKAGES,
    Combination,
    cann_version,
    check_ascend_versions,
    installed_versions,
)
from agentrl.cluster.local import LocalHost
from agentrl.config import load_config
from agentrl.device import DeviceError
from agentrl.launch import prepare
from tests.support.fake_npu import FakeNpu

BEST = COMBINATIONS[0].installed()
TRAINER = {"cann": "9.1.0", "torch": "2.12.0", "torch_npu": "2.12.0"}


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: f"{row.torch_npu} {row.vllm_ascend}")
def test_a_known_combination_has_no_problems(row: Combination) -> None:
    assert check_ascend_versions(row.installed()) == []
    local = {name: f"{text}+empty" for name, text in row.installed().items()}
    assert check_ascend_versions(local) == []


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: f"{row.torch_npu} {row.vllm_ascend}")
def test_the_table_keeps_its_own_rules_and_agentrls(row: Combination) -> None:
    def minor(text: str) -> list[str]:
        return text.split(".")[:2]

    assert minor(row.torch) == minor(row.torch_npu)
    assert minor(row.vllm) == minor(row.vllm_ascend)
    assert 10 <= int(minor(row.torch)[1]) < 14


def test_no_combination_is_listed_twice() -> None:
    assert len(set(COMBINATIONS)) == len(COMBINATIONS)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (
            {"torch": "2.13.0+cpu", "torch_npu": "2.10.0.post4"},
            r"^torch 2\.13\.0 and torch_npu 2\.10\.0\.post4 do not match, .*"
            r"install torch==2\.10\.\* or torch_npu==2\.13\.\*$",
        ),
        (BEST | {"vllm": "0.32.0"}, r"^vllm 0\.32\.0 and vllm-ascend 0\.23\.0\.post1 .*install vllm==0\.23\.0$"),
        (BEST | {"vllm-ascend": "0.25.1rc1"}, r"^vllm 0\.23\.0 and vllm-ascend 0\.25\.1rc1 .*vllm==0\.25\.1$"),
        (BEST | {"vllm": "0.32.0", "vllm-ascend": "0.31.0"}, r"install vllm==0\.31\.\*$"),
        ({**TRAINER, "vllm-ascend": "0.31.0"}, r"^vllm-ascend 0\.31\.0 is installed without vllm: .*vllm==0\.31\.\*$"),
        (
            TRAINER | {"vllm": "0.23.0", "vllm-ascend": "0.23.0"},
            r"^vllm-ascend 0\.23\.0 is built for torch 2\.10\.0, and 2\.12\.0 is installed: install torch==2\.10\.0 "
            r"torch_npu==2\.10\.0\.post4 vllm==0\.23\.0 vllm-ascend==0\.23\.0$",
        ),
        ({"torch": "2.11.0"}, r"^torch_npu is not installed: install torch==2\.11\.0 torch_npu==2\.11\.0$"),
        ({}, r"^torch_npu is not installed: install torch==2\.10\.0 torch_npu==2\.10\.0\.post4$"),
    ],
)
def test_a_mismatch_is_fatal_and_says_what_to_install(installed: dict[str, str], message: str) -> None:
    [problem] = check_ascend_versions(installed)
    assert problem.fatal
    assert re.search(message, str(problem))


def test_every_mismatch_is_told() -> None:
    problems = check_ascend_versions(BEST | {"torch": "2.12.0", "vllm": "0.32.0"})
    assert [problem.fatal for problem in problems] == [True] * 3


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (BEST | {"torch_npu": "2.10.0.post7"}, r"not known to work: torch_npu 2\.10\.0\.post7 rather than .*post4; "),
        (BEST | {"cann": "9.2.1"}, r"not known to work: cann 9\.2\.1 rather than 9\.1\.0; "),
        (
            {"cann": "9.2.1", "torch": "2.11.0", "torch_npu": "2.11.0", "vllm": "0.30.0", "vllm-ascend": "0.30.0"},
            r"cann 9\.2\.1 rather than 9\.1\.0, vllm 0\.30\.0, vllm-ascend 0\.30\.0; known to work: cann 9\.1\.0, ",
        ),
        (
            {"cann": "9.1.0", "torch": "2.13.0", "torch_npu": "2.13.0"},
            r"torch 2\.13\.0 rather than 2\.10\.0, torch_npu",
        ),
        (
            {name: text for name, text in BEST.items() if name != "cann"},
            r"^no installed CANN is found: source its set_env\.sh",
        ),
        (TRAINER | {"vllm": "0.23.0"}, r"^vllm 0\.23\.0 is installed without .*: install vllm-ascend==0\.23\.\*$"),
    ],
)
def test_what_is_not_known_is_a_warning(installed: dict[str, str], message: str) -> None:
    [problem] = check_ascend_versions(installed)
    assert not problem.fatal
    assert re.search(message, problem.text)


def test_installed_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.10.0+cpu", "vllm-ascend": "0.23.0"}

    def look_up(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("agentrl.ascend.version", look_up)
    monkeypatch.setattr("agentrl.ascend.cann_version", lambda: "9.1.0")
    assert installed_versions() == {"cann": "9.1.0", **there}
    monkeypatch.setattr("agentrl.ascend.cann_version", lambda: None)
    assert installed_versions() == there
    monkeypatch.undo()
    assert installed_versions()["torch"] == version("torch")
    assert set(installed_versions()) <= {"cann", *PACKAGES}


def write_install_file(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "ascend_toolkit_install.info").write_text(f"package_name=Ascend-cann-toolkit\nversion={text}\narch=x\n")


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
@pytest.mark.parametrize("below", ["x86_64-linux", "aarch64-linux", "."])
def test_canns_version_is_in_the_folder_that_its_environment_names(tmp_path: Path, name: str, below: str) -> None:
    write_install_file(tmp_path / "named" / below, "8.3.RC2")
    write_install_file(tmp_path / "default" / below, "9.1.0")
    homes = (tmp_path / "missing", tmp_path / "default")
    assert cann_version({name: str(tmp_path / "named")}, homes) == "8.3.RC2"
    assert cann_version({name: ""}, homes) == cann_version({name: str(tmp_path / "none")}, homes) == "9.1.0"
    assert cann_version({}, (tmp_path / "missing",)) is None


def test_an_unreadable_or_empty_install_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "ascend_toolkit_install.info").mkdir()
    (tmp_path / "ascend_nnae_install.info").write_text("package_name=Ascend-cann-nnae\n")
    assert cann_version({}, (tmp_path,)) is None


def test_engines_are_set_for_weight_updates() -> None:
    assert ENGINE_ENVIRONMENT == {"VLLM_ASCEND_ENABLE_NZ": "0"}


def test_it_is_a_leaf_that_imports_none_of_the_packages() -> None:
    code = "import sys, agentrl.ascend as a; a.installed_versions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


CONFIG = {
    "model": {"path": "tiny"},
    "data": {"train": "agentrl.envs.math:arithmetic_tasks"},
    "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
    "trainer": {"total_steps": 1, "device": "npu"},
}


class TestARun:
    """What starting one on NPUs does about it, here with a stand-in for `torch.npu`."""

    @pytest.fixture(autouse=True)
    def npu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "npu", FakeNpu(), raising=False)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def test_ends_before_it_begins_with_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentrl.launch.installed_versions", lambda: TRAINER | {"torch": "2.13.0"})
        config = load_config(CONFIG, [f"trainer.output_dir={tmp_path}"])
        with pytest.raises(DeviceError, match=r"torch 2.13.0 and torch_npu 2.12.0 do not match"):
            prepare(config, (), experiment="npu")
        assert not list(tmp_path.iterdir())

    def test_puts_doubts_on_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentrl.launch.installed_versions", lambda: TRAINER | {"cann": "8.5.0"})
        launch = prepare(load_config(CONFIG, [f"trainer.output_dir={tmp_path}"]), (), experiment="npu")
        environment = json.loads((launch.run_dir / "environment.json").read_text())
        (doubt,) = environment["not_known_to_work"]
        assert "cann 8.5.0 rather than 9.1.0" in doubt
        assert environment["untested_on_hardware"] == "npu"

    def test_gives_its_processes_the_settings_of_their_device(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: dict[str, dict[str, str]] = {}

        async def start(self: Any, role: str, environment: dict[str, str], *, restarts: int = 0) -> None:
            started[role] = environment

        async def play() -> None:
            overrides = ["weights.transport=collective", "weights.timeout=300", "rollout.n_gpus_per_node=8"]
            async with LocalHost(load_config(CONFIG, overrides), tmp_path, "nowhere", ()):
                pass

        monkeypatch.setattr("agentrl.cluster.processes.Processes.start", start)
        asyncio.run(play())
        assert started["trainer"]["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
        assert "PYTORCH_NPU_ALLOC_CONF" not in started["engine-0"]
        for role in ("trainer", "engine-0", "engine-7"):
            assert started[role]["HCCL_CONNECT_TIMEOUT"] == "300"
            assert started[role]["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"  # nine processes, eight devices
        assert "HCCL_CONNECT_TIMEOUT" not in started["rollout"]
