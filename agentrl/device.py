"""The device layer: cpu, cuda and npu behind the few names the rest needs. A leaf that every room may import."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("cpu", "cuda", "npu")
_HCCL_CONNECT_SECONDS = (120, 7200)
"""How long HCCL waits for the other members of a new group: its default, and the most that it takes."""
_HCCL_EXEC_SECONDS = 1836
"""How long HCCL waits for the others within an operation, unless told otherwise."""


class DeviceError(ValueError):
    """The asked-for device is not there, or what drives it can't be loaded; says what is there, or why not."""


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

    def empty_cache(self) -> None:
        """Gives memory that torch keeps for later, but nothing uses, back to the device."""
        module = self.module()
        if module is not None:
            module.empty_cache()

    def names(self) -> list[str]:
        """The devices that the process sees, with their models: `cuda:0 NVIDIA H200`, ..., or just `cpu`."""
        module = self.module()
        if module is None:
            return [self.type]
        return [f"{self.type}:{index} {module.get_device_name(index)}" for index in range(self.count())]

    def environment(self, indexes: int | Sequence[int], parent: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment variables that give a process these devices and no other; without any, none.

        To that process the first of them is device 0, and so on. NPUs come in ascending order, however asked for:
        their runtime sees no device at all where a number is followed by a lower one.

        Args:
            indexes: one or several, as the parent process counts the devices that it sees itself.
            parent: environment of the parent process; this process's own where it is not given.

        Raises:
            DeviceError: a device that the parent does not see, or one twice.
        """
        if not self.visible_devices:
            return {}
        wanted = [indexes] if isinstance(indexes, int) else list(indexes)
        if len(set(wanted)) < len(wanted) or min(wanted, default=0) < 0:
            raise DeviceError(f"{self.type} devices {wanted}: indexes count from 0, and each is given once")
        if self.type == "npu":
            wanted.sort()
        limit = (os.environ if parent is None else parent).get(self.visible_devices)
        if limit is None:
            return {self.visible_devices: ",".join(map(str, wanted))}
        # Numbers or unique ids. One below zero hides what comes after it too.
        seen = list(takewhile(lambda name: name and name[0] != "-", (name.strip() for name in limit.split(","))))
        if max(wanted, default=-1) >= len(seen):
            raise DeviceError(
                f"{self.type} devices {wanted}: {self.visible_devices}={limit!r} shows this process {len(seen)} of them"
            )
        return {self.visible_devices: ",".join(seen[index] for index in wanted)}

    def collective_environment(
        self, timeout: float, *, shared: bool = False, parent: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Environment variables for a process whose groups have a time-out of torch.

        HCCL has time-outs of its own, for the whole process: here they are made no shorter than torch's, and never
        shorter than by default, since the groups within an engine live under them too. That it ends in time is torch's
        part. What the parent's environment says already stays as it is.

        Args:
            timeout: of the groups, in seconds.
            shared: whether processes share a device; then the system chooses the ports, which otherwise collide.
            parent: environment of the parent process; this process's own where it is not given.
        """
        if self.collective_backend != "hccl":
            return {}
        least, most = _HCCL_CONNECT_SECONDS
        settings = {"HCCL_CONNECT_TIMEOUT": str(min(max(math.ceil(timeout), least), most))}
        if timeout > _HCCL_EXEC_SECONDS:
            settings["HCCL_EXEC_TIMEOUT"] = str(math.ceil(timeout))
        if shared:
            settings |= {"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
        given = os.environ if parent is None else parent
        return {name: value for name, value in settings.items() if name not in given}

    def allocator_environment(self, parent: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment variables for a process that trains: on NPUs, segments of memory that grow rather than fragment.

        Not for engines: vLLM's plugin sets the same itself where that is right, and fails with it in sleep mode.

        Args:
            parent: environment of the parent process; this process's own where it is not given.
        """
        given = os.environ if parent is None else parent
        # The two names are of the same setting, and torch_npu ends a process that has both.
        if self.type != "npu" or "PYTORCH_NPU_ALLOC_CONF" in given or "PYTORCH_ALLOC_CONF" in given:
            return {}
        return {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


_DEVICES = {
    "cpu": Device("cpu", "gloo", "", ""),
    "cuda": Device("cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES"),
    "npu": Device("npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES"),
}


def get_device(name: str = "auto") -> Device:
    """The device called `cpu`, `cuda` or `npu`, checked to be there; `auto` takes npu, else cuda, else cpu.

    Raises:
        DeviceError: an unknown name, a device that torch does not see, or a torch_npu that can't be loaded. With
            `auto` the last is none where TORCH_DEVICE_BACKEND_AUTOLOAD=0 says that torch may do without it.
    """
    if name == "auto":
        return next(_DEVICES[kind] for kind in ("npu", "cuda", "cpu") if _chosen(kind))
    if name not in _DEVICES:
        raise DeviceError(f"trainer.device is {name!r}: use one of auto, {', '.join(DEVICE_TYPES)}")
    if not _available(name):
        variable = _DEVICES[name].visible_devices
        limit = f" with {variable}={os.environ[variable]!r}" if variable in os.environ else ""
        there = ", ".join(kind for kind in DEVICE_TYPES if _loads(kind))
        raise DeviceError(f"trainer.device is {name!r}, but torch sees no such device{limit}; there is: {there}")
    return _DEVICES[name]


def _available(kind: str) -> bool:
    if kind == "cpu":
        return True
    torch = _import_torch()
    if kind == "npu" and not _npu_module(torch):
        return False
    return bool(getattr(torch, kind).is_available())


def _chosen(kind: str) -> bool:
    return _loads(kind) if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" else _available(kind)


def _loads(kind: str) -> bool:
    try:
        return _available(kind)
    except DeviceError:
        return False


def _import_torch() -> Any:
    """torch, which loads the torch_npu beside it, and fails with it."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        if importlib.util.find_spec("torch_npu") is None:
            raise
        raise DeviceError(_why_not_loaded(error)) from error
    return torch


def _npu_module(torch: Any) -> bool:
    """Whether there is a `torch.npu`, loaded if need be."""
    if not hasattr(torch, "npu"):
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(_why_not_loaded(error)) from error
    mismatch = _mismatch()
    if mismatch:
        raise DeviceError(mismatch)
    return True


def _why_not_loaded(error: Exception) -> str:
    """What to tell who installed torch_npu and can't import it; torch's own error has the reason as its cause."""
    reason = error.__cause__ or error
    advice = _mismatch()
    if not advice and ".so" in str(reason):
        advice = "a library of CANN is missing: install CANN, and source its set_env.sh before starting this"
    without = "to run without NPUs, set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    texts = (f"torch_npu is installed but can't be loaded: {type(reason).__name__}: {reason}", advice, without)
    return "; ".join(text for text in texts if text)


def _mismatch() -> str:
    """That torch_npu is for another torch; empty where it is for this one. It is built for one minor version of it."""
    try:
        torch, npu = version("torch"), version("torch_npu")
    except PackageNotFoundError:
        return ""
    of_torch, of_npu = (".".join(text.split(".")[:2]) for text in (torch, npu))
    if of_torch == of_npu:
        return ""
    return f"torch {torch} and torch_npu {npu} do not match: install torch {of_npu}.* or torch_npu {of_torch}.*"


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
