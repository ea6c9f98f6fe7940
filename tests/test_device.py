"""The device layer: what is there is found, what is not is refused with what there is."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agentrl.device import DEVICE_TYPES, Device, DeviceError, _free_main_memory, compute_environment, get_device


class FakeNpu(ModuleType):
    """What `torch_npu` puts at `torch.npu`, as far as we use it."""

    def __init__(self, available: bool = True) -> None:
        super().__init__("torch.npu")
        self.available = available
        self.synchronised = 0

    def is_available(self) -> bool:
        return self.available

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1000 + index, 5000

    def synchronize(self) -> None:
        self.synchronised += 1


@pytest.fixture
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", FakeNpu(available=False), raising=False)


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_machine_without_accelerator_computes_on_its_cpu(name: str) -> None:
    device = get_device(name)
    assert (device.type, device.collective_backend, device.ray_resource) == ("cpu", "gloo", "")
    assert device.torch_device(3) == torch.device("cpu")
    assert device.environment(3) == {}
    assert device.module() is None
    device.synchronize()


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_a_device_that_is_not_there_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(DeviceError, match=f"trainer.device is '{name}', .*there is: cpu$"):
        get_device(name)


@pytest.mark.parametrize("name", ["gpu", "CPU", "", "cuda:0"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(DeviceError, match="use one of auto, cpu, cuda, npu"):
        get_device(name)


@pytest.mark.usefixtures("without_accelerators")
def test_an_npu_is_found_and_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = FakeNpu()
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_device("auto") is get_device("npu")
    device = get_device("auto")
    assert (device.type, device.collective_backend, device.ray_resource) == ("npu", "hccl", "NPU")
    assert device.environment(5) == {"ASCEND_RT_VISIBLE_DEVICES": "5"}
    assert device.module() is npu
    device.synchronize()
    assert npu.synchronised == 1
    assert [device.free_memory(index) for index in (0, 3)] == [1000, 1003]


def test_an_npu_whose_module_is_not_loaded_yet_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "npu", raising=False)
    plugin = ModuleType("torch_npu")
    plugin.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        monkeypatch.setattr(torch, "npu", FakeNpu(), raising=False)
        return plugin

    monkeypatch.setitem(sys.modules, "torch_npu", plugin)
    monkeypatch.setattr("agentrl.device.importlib.import_module", load)
    assert get_device("npu").type == "npu"
    assert loaded == ["torch_npu"]


@pytest.mark.usefixtures("without_accelerators")
def test_a_gpu_is_found_where_there_is_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = get_device("auto")
    assert (device.type, device.collective_backend, device.ray_resource) == ("cuda", "nccl", "GPU")
    assert device.torch_device(2) == torch.device("cuda", 2)
    assert device.environment(2) == {"CUDA_VISIBLE_DEVICES": "2"}


V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "anon 9\ninactive_file {cached}\n"}
V1 = {
    "memory.limit_in_bytes": "{limit}",
    "memory.usage_in_bytes": "{used}",
    "memory.stat": "inactive_file 3\ntotal_inactive_file {cached}\n",
}


def write_group(folder: Path, files: dict[str, str], limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content.format(limit=limit, used=used, cached=cached))


def write_proc(root: Path, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal: 9000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Free: 0\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)


def test_the_memory_left_on_a_cpu_counts_caches_as_free(tmp_path: Path) -> None:
    write_proc(tmp_path, "0::/\n")
    assert _free_main_memory(tmp_path) == 1_024_000
    assert 0 < get_device("cpu").free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_without_proc_it_is_what_the_system_calls_available(tmp_path: Path) -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert _free_main_memory(tmp_path) == pytest.approx(available, rel=0.5)


@pytest.mark.parametrize(("top", "line", "files"), [("", "0::", V2), ("memory", "4:cpu,memory:", V1)])
def test_it_is_what_the_tightest_control_group_leaves(
    top: str, line: str, files: dict[str, str], tmp_path: Path
) -> None:
    write_proc(tmp_path, f"9:name=systemd:/\n{line}/pod/box\n")
    pod = tmp_path / "sys/fs/cgroup" / top / "pod"
    write_group(pod / "box", files, 2**63 - 4096, 700_000, 0)
    write_group(pod, files, 900_000, 800_000, 50_000)
    assert _free_main_memory(tmp_path) == 150_000
    write_group(pod, files, "max", 800_000, 50_000)
    assert _free_main_memory(tmp_path) == 1_024_000
    write_group(pod / "box", files, 600_000, 700_000, 0)
    assert _free_main_memory(tmp_path) == 0


@pytest.mark.parametrize(("top", "line", "files"), [("", "0::", V2), ("memory", "4:memory:", V1)])
def test_in_a_container_the_group_is_found_at_the_top(
    top: str, line: str, files: dict[str, str], tmp_path: Path
) -> None:
    write_proc(tmp_path, f"{line}/docker/0123\n")
    write_group(tmp_path / "sys/fs/cgroup" / top, files, 900_000, 800_000, 0)
    assert _free_main_memory(tmp_path) == 100_000


def test_every_device_is_described() -> None:
    assert DEVICE_TYPES == ("cpu", "cuda", "npu")
    assert Device("cpu", "gloo", "", "") == get_device("cpu")


def test_processes_compute_with_the_threads_they_are_given() -> None:
    environment = compute_environment(1)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert all(isinstance(value, str) for value in environment.values())
    code = "import torch; print(torch.get_num_threads())"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"
    assert compute_environment(4)["OMP_NUM_THREADS"] == "4"


def test_the_cpu_is_there_without_torch() -> None:
    code = "import sys, agentrl.device as d; d.get_device('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
