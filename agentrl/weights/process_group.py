"""Process groups between processes that share no other one: the trainer's rank 0 and the workers of engines."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from agentrl.record import WeightTransferError
from agentrl.record.protocols import WeightGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup


def open_store(host: str, world_size: int, timeout: float) -> TCPStore:
    """Serves the store of a new group, on a free port of all interfaces; `host` is how the others reach it."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )  # `port` says which one it is


def join_group(group: WeightGroup, rank: int, store: TCPStore | None = None) -> ProcessGroup:
    """Enters a group; returns when all its members have.

    `torch.distributed` has no public way to a group outside its default one, which belongs to trainer or engine alone;
    this is the one that vLLM, SGLang and the trainers of the field use. The backend is one argument, whichever device
    it is for.

    Args:
        store: of the one who serves it.

    Raises:
        WeightTransferError: the others were not in time, or torch has no such backend.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=group.timeout)
    host, _, port = group.address.rpartition(":")
    try:
        if store is None:
            store = TCPStore(
                host, int(port), group.world_size, is_master=False, timeout=timeout, wait_for_workers=False
            )
        made, _ = c10d._new_process_group_helper(
            group.world_size,
            rank,
            [],
            c10d.Backend(group.backend),
            PrefixStore(group.name, store),
            group_name=c10d.GroupName(group.name),
            timeout=timeout,
        )
    except (RuntimeError, ValueError, AssertionError) as error:  # the last one: a backend that torch does not know
        raise WeightTransferError(
            f"rank {rank} of {group.world_size} can't join the weight group at {group.address} over {group.backend}: "
            f"{error}"
        ) from error
    # As `new_group` does: without it, calls by global rank (`broadcast(src=0)`) would not know the members.
    c10d._world.pg_group_ranks[made] = {member: member for member in range(group.world_size)}
    return cast("ProcessGroup", made)


def broadcast(group: ProcessGroup, data: torch.Tensor) -> None:
    """From rank 0 to the others; returns when `data` may be used.

    Raises:
        WeightTransferError: a member is gone, or was not in time.
    """
    import torch.distributed as dist

    try:
        dist.broadcast(data, src=0, group=group)
        if data.device.type != "cpu":
            torch.get_device_module(data.device).synchronize(data.device)
    except RuntimeError as error:
        raise WeightTransferError(f"broadcast of {data.numel()} bytes: {error}") from error


def leave_group(group: ProcessGroup) -> None:
    """Ends a member's part, whatever the others do: what still waits in it fails."""
    from torch.distributed import distributed_c10d as c10d

    hccl = None if group._device_types[0].type != "npu" else group._get_backend(torch.device("npu"))
    if hccl is not None and hasattr(hccl, "abort_hccl_comm"):
        cast(Any, hccl).abort_hccl_comm(
            "weight transfer"
        )  # torch_npu does not override torch's `abort`, which does nothing
    else:
        group.abort()
    for table in (c10d._world.pg_group_ranks, c10d._world.pg_map, c10d._world.pg_names):
        table.pop(group, None)
