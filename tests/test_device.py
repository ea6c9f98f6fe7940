"""The device layer: what is there is found, what is not is refused with what there is."""

from __future__ import annotations

import asyncio
import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentrl.cluster.process import make_sender
from agentrl.config import load_config
from agentrl.device import DEVICE_TYPES, Device, DeviceError, _free_main_memory, compute_environment, get_device
from agentrl.record.protocols import WeightGroup, WeightReceivers
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import CollectiveSender
from agentrl.weights.process_group import open_store
from tests.support.fake_npu import FakeNpu, install_torch_npu

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", FakeNpu(()), raising=False)


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_machine_without_accelerator_computes_on_its_cpu(name: str) -> None:
    device = get_device(name)
    assert (device.type, device.collective_backend, device.ray_resource) == ("cpu", "gloo", "")
    assert device.torch_device(3) == torch.device("cpu")
    assert device.environment(3) == {}
    assert device.module() is None
    assert (device.count(), device.names()) == (1, ["cpu"])
    assert device.environment([0, 1]) == device.collective_environment(60) == device.allocator_environment() == {}
    device.synchronize()
    device.empty_cache()


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
    device.empty_cache()
    assert npu.calls == ["synchronize", "empty_cache"]
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


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch, without_accelerators: None) -> Device:
    monkeypatch.setattr(torch, "npu", FakeNpu(("Ascend910B3", "Ascend910_9392")), raising=False)
    return get_device("npu")


def test_devices_are_counted_and_named(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert npu.count() == 2
    assert npu.names() == ["npu:0 Ascend910B3", "npu:1 Ascend910_9392"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H200 number {index}")
    assert get_device("cuda").names() == ["cuda:0 NVIDIA H200 number 0"]


@pytest.mark.parametrize(
    ("indexes", "limit", "expected"),
    [
        (5, None, "5"),
        ([3, 1], None, "1,3"),
        (1, "2,4,6", "4"),
        ([2, 0], "2,4,6", "2,6"),
        ([], "2,4,6", ""),
    ],
)
def test_a_process_gets_the_npus_with_these_indexes_in_the_parents_list(
    npu: Device, indexes: int | list[int], limit: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    parent = {} if limit is None else {name: limit}
    assert npu.environment(indexes, parent) == {name: expected}
    monkeypatch.delenv(name, raising=False)
    for variable, value in parent.items():
        monkeypatch.setenv(variable, value)
    assert npu.environment(indexes) == {name: expected}


@pytest.mark.parametrize(
    ("indexes", "limit", "expected"),
    [
        ([3, 1], None, "3,1"),
        (1, "GPU-8932f937, GPU-1a2b3c4d", "GPU-1a2b3c4d"),
        ([1, 0], "MIG-aa/1,MIG-bb/2", "MIG-bb/2,MIG-aa/1"),
    ],
)
@pytest.mark.usefixtures("without_accelerators")
def test_gpus_keep_their_order_and_their_ids(
    indexes: int | list[int], limit: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = "CUDA_VISIBLE_DEVICES"
    parent = {} if limit is None else {name: limit}
    assert get_device("cuda").environment(indexes, parent) == {name: expected}


@pytest.mark.parametrize(
    ("indexes", "limit", "message"),
    [
        (2, "2,4", "VISIBLE_DEVICES='2,4' shows this process 2 of them"),
        (0, "", "VISIBLE_DEVICES='' shows this process 0 of them"),
        (1, "3,-1,4", "VISIBLE_DEVICES='3,-1,4' shows this process 1 of them"),
        (-1, None, "indexes count from 0"),
        ([1, 1], None, "each is given once"),
    ],
)
def test_devices_that_the_parent_does_not_see_are_refused(
    npu: Device, indexes: int | list[int], limit: str | None, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        npu.environment(indexes, {} if limit is None else {"ASCEND_RT_VISIBLE_DEVICES": limit})


def test_hccl_is_as_patient_as_torch_and_never_less_than_by_default(npu: Device) -> None:
    def environment(timeout: float, parent: dict[str, str] | None = None, **keywords: bool) -> dict[str, str]:
        return npu.collective_environment(timeout, parent=parent or {}, **keywords)

    assert environment(10) == environment(120) == {"HCCL_CONNECT_TIMEOUT": "120"}
    assert environment(300.5) == {"HCCL_CONNECT_TIMEOUT": "301"}
    assert environment(9000) == {"HCCL_CONNECT_TIMEOUT": "7200", "HCCL_EXEC_TIMEOUT": "9000"}
    assert environment(9000, {"HCCL_CONNECT_TIMEOUT": "600"}) == {"HCCL_EXEC_TIMEOUT": "9000"}
    ports = {"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
    assert environment(10, shared=True) == {"HCCL_CONNECT_TIMEOUT": "120", **ports}


def test_the_allocator_is_set_unless_it_is_already(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert npu.allocator_environment({}) == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert npu.allocator_environment({name: "page_size:1g"}) == {}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "page_size:1g")
    assert npu.allocator_environment() == {}


@pytest.mark.usefixtures("without_accelerators")
def test_the_limit_that_hides_all_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,1")
    with pytest.raises(DeviceError, match=r"no such device with ASCEND_RT_VISIBLE_DEVICES='3,1'; there is: cpu$"):
        get_device("npu")


def test_versions_that_do_not_match_are_refused_though_they_load(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch_npu": "2.10.0.post4"}
    monkeypatch.setattr("agentrl.device.version", versions.__getitem__)
    with pytest.raises(DeviceError, match=r"do not match: install torch 2\.10\.\* or torch_npu 2\.13\.\*"):
        get_device("npu")
    versions["torch"] = "2.10.0+cpu"
    assert get_device("npu") is npu


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"


def run_with_torch_npu(folder: Path, code: str, name: str, **environment: str) -> str:
    """What `get_device(name)` says in a process that has a torch_npu with this code."""
    minor = ".".join(torch.__version__.split(".")[:2])
    result = subprocess.run(
        [
            *(sys.executable, "-c"),
            f"from agentrl.device import DeviceError, get_device\ntry: print(get_device({name!r}).type)\n"
            "except DeviceError as error: print(error)",
        ],
        env=os.environ
        | {"PYTHONPATH": str(install_torch_npu(folder, environment.pop("version", f"{minor}.0"), code))}
        | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


@pytest.mark.parametrize("name", ["auto", "npu"])
def test_a_torch_npu_without_cann_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    said = run_with_torch_npu(tmp_path, NO_CANN, name)
    assert said.startswith("torch_npu is installed but can't be loaded: ImportError: libhccl.so: cannot open")
    assert "install CANN, and source its set_env.sh" in said
    assert said.endswith("to run without NPUs, set TORCH_DEVICE_BACKEND_AUTOLOAD=0")


def test_a_torch_npu_that_torch_may_do_without_is_no_error_unless_asked_for(tmp_path: Path) -> None:
    without = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
    assert run_with_torch_npu(tmp_path / "1", NO_CANN, "auto", **without) == "cpu"
    assert "install CANN" in run_with_torch_npu(tmp_path / "2", NO_CANN, "npu", **without)
    assert run_with_torch_npu(tmp_path / "3", NO_CANN, "cuda", **without).endswith("there is: cpu")


def test_a_torch_npu_for_another_torch_is_refused_with_what_to_install(tmp_path: Path) -> None:
    code = "raise ImportError('_C.so: undefined symbol: _ZN5torch')"
    said = run_with_torch_npu(tmp_path, code, "npu", version="2.5.1.post1")
    assert "undefined symbol" in said and "install CANN" not in said
    assert f"torch {torch.__version__} and torch_npu 2.5.1.post1 do not match: install torch 2.5.*" in said


def test_the_weight_group_gets_the_devices_backend(
    npu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("agentrl.weights.collective.CollectiveSender", lambda nbytes, **rest: given.update(rest))
    # torch itself knows no device of type npu.
    monkeypatch.setattr(Device, "torch_device", lambda self, index=0: torch.device("cpu"))
    config = {"data": {"train": "t.jsonl"}, "trainer": {"device": "npu"}, "weights": {"transport": "collective"}}
    make_sender(load_config(config), tmp_path)
    assert given["backend"] == npu.collective_backend == "hccl"


def test_the_group_that_engines_are_told_of_has_that_backend(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[WeightGroup] = []
    monkeypatch.setattr("agentrl.weights.collective.join_group", lambda group, rank, store: joined.append(group))
    sender = CollectiveSender(
        BucketLayout(100), backend=npu.collective_backend, device=torch.device("cpu"), host="127.0.0.1", timeout=5
    )

    async def join(group: WeightGroup) -> None:
        told.append(group)

    told: list[WeightGroup] = []
    asyncio.run(sender.connect(WeightReceivers(("engine-0",), (1,)), join))
    assert told == joined and [group.backend for group in told] == ["hccl"]


MEMBER = """
import sys
import torch
from agentrl.record.protocols import WeightGroup
from agentrl.weights.bucket import BucketLayout
from agentrl.weights.collective import broadcast
from agentrl.weights.process_group import join_group, leave_group
from tests.support.fake_npu import register_hccl

register_hccl()
rank, address = int(sys.argv[1]), sys.argv[2]
group = join_group(WeightGroup("weights", address, "hccl", 2, 1, 60.0), rank)
data = torch.arange(5, dtype=torch.uint8) if rank == 0 else torch.zeros(5, dtype=torch.uint8)
broadcast(group, data)
print(group.name(), data.tolist())
leave_group(group)
"""


def test_weights_go_over_a_backend_that_a_plugin_registered() -> None:
    store = open_store("127.0.0.1", 2, 60)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), f"127.0.0.1:{store.port}"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [member.communicate(timeout=120)[0].strip() for member in members] == ["custom [0, 1, 2, 3, 4]"] * 2


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
