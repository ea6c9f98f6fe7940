"""The device layer: cpu, cuda and npu behind the few names the rest needs. A leaf that every room may import."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("cpu", "cuda", "npu")


class DeviceError(ValueError):
    """The asked-for device is not there; says what is."""


@dataclass(frozen=True, slots=True)
class Device:
    """What differs between devices.

    Attributes:
        type: torch's device type.
        collective_backend: of torch.distributed.
        ray_resource: what Ray counts; empty where processes need none.
        visible_devices: environment variable that limits a process to some devices; empty on cpu.
    """

    type: str
    collective_backend: str
    ray_resource: str
    visible_devices: str

    def torch_device(self, index: int = 0) -> torch.device:
        """The torch device of this type with that index."""
        import torch

        return torch.device(self.type) if self.type == "cpu" else torch.device(self.type, index)

    def module(self) -> Any:
        """`torch.cuda`, `torch.npu`, or None on cpu."""
        import torch

        return None if self.type == "cpu" else getattr(torch, self.type)

    def count(self) -> int:
        """Devices of this type that the process sees; 1 on cpu."""
        module = self.module()
        return 1 if module is None else int(module.device_count())

    def free_memory(self, index: int = 0) -> int:
        """Bytes free on the device with that index; on cpu, what this process can have of main memory."""
        module = self.module()
        return _free_main_memory(Path("/")) if module is None else int(module.mem_get_info(index)[0])

    def synchronize(self) -> None:
        """Waits for the device's queued work, so that a clock measures it."""
        module = self.module()
        if module is not None:
            module.synchronize()

    def environment(self, index: int) -> dict[str, str]:
        """Environment variables that give a process the device with that index and no other."""
        return {self.visible_devices: str(index)} if self.visible_devices else {}


_DEVICES = {
    "cpu": Device("cpu", "gloo", "", ""),
    "cuda": Device("cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES"),
    "npu": Device("npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES"),
}


def get_device(name: str = "auto") -> Device:
    """The device called `cpu`, `cuda` or `npu`, checked to be there; `auto` takes npu, else cuda, else cpu.

    Raises:
        DeviceError: an unknown name, or a device that torch does not see.
    """
    if name == "auto":
        return next(_DEVICES[kind] for kind in ("npu", "cuda", "cpu") if _available(kind))
    if name not in _DEVICES:
        raise DeviceError(f"trainer.device is {name!r}: use one of auto, {', '.join(DEVICE_TYPES)}")
    if not _available(name):
        there = ", ".join(kind for kind in DEVICE_TYPES if _available(kind))
        raise DeviceError(f"trainer.device is {name!r}, but torch sees no such device; there is: {there}")
    return _DEVICES[name]


def _available(kind: str) -> bool:
    if kind == "cpu":
        return True
    import torch

    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None and not hasattr(torch, "npu"):
            return False
        if not hasattr(torch, "npu"):
            importlib.import_module("torch_npu")
    return bool(getattr(torch, kind).is_available())


def _free_main_memory(root: Path) -> int:
    """What the machine and the control groups of this process leave it; caches of files make room for who needs it."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024.0 * available
    for group in _lines(root / "proc/self/cgroup"):
        _, controllers, path = group.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Any group above limits it too. In a container the path may be the machine's, and `top` the group itself.
        own = top / path.lstrip("/")
        free = min([free, *(_left_in_group(folder, *names) for folder in (own, *own.parents))])
    return max(0, int(free))


def _left_in_group(folder: Path, limit: str, used: str, cached: str) -> float:
    """Bytes below a control group's limit; infinite where there is no limit, or none that can be read."""
    try:
        below = int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):
        return math.inf
    return below + _numbers(folder / "memory.stat").get(cached, 0)


def _numbers(file: Path) -> dict[str, int]:
    """By the names at the beginning of the lines."""
    fields = (line.split() for line in _lines(file))
    return {name.rstrip(":"): int(number) for name, number, *_ in fields}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def compute_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes on this machine's CPU: pinned threads, memory kept and in large pages.

    Without it the C library gives every freed activation back to the system, and the trainer runs at half its speed.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        "MALLOC_TOP_PAD_": "500000000",
    }
