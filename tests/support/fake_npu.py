"""What stands in for Ascend hardware in tests: `torch.npu`, an installed torch_npu, and the hccl backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class FakeNpu(ModuleType):
    """What `torch_npu` puts at `torch.npu`, as far as we use it.

    Args:
        models: names of the devices, by index.

    Attributes:
        calls: names of the functions called for what they do.
    """

    def __init__(self, models: Sequence[str] = ("Ascend910B3",) * 8) -> None:
        super().__init__("torch.npu")
        self.models = tuple(models)
        self.calls: list[str] = []

    def is_available(self) -> bool:
        return bool(self.models)

    def device_count(self) -> int:
        return len(self.models)

    def get_device_name(self, index: int) -> str:
        return self.models[index]

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1000 + index, 5000

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


def install_torch_npu(folder: Path, version: str, code: str) -> Path:
    """An installed torch_npu, for processes with the returned folder in PYTHONPATH: torch loads it by its entry point.

    Args:
        code: of its `__init__.py`.
    """
    package, metadata = folder / "torch_npu", folder / f"torch_npu-{version}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def register_hccl() -> None:
    """Gives torch.distributed a backend called hccl, as torch_npu does. It is gloo, and for the CPU."""
    import torch.distributed as dist

    def make(options: Any, _: Any) -> Any:
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)

    dist.Backend.register_backend("hccl", make, extended_api=True, devices=["cpu"])
