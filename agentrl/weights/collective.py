"""Weights by broadcast from the trainer's rank 0 to all workers of all engines, on whatever device they are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from agentrl.record import WeightTransferError
from agentrl.record.protocols import Bucket, WeightGroup, WeightReceivers
from agentrl.weights.bucket import BucketLayout, Pieces, bucket_nbytes, fill
from agentrl.weights.process_group import broadcast, join_group, leave_group, open_store
from agentrl.weights.sender import Deliver, Join, WeightSender

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CollectiveSender(WeightSender):
    """Broadcasts buckets over a process group; what is in them goes ahead as a message.

    The group is made anew when its members are others than last time, or when a transfer failed. A member that fails
    takes the group with it: the transfer fails for all of them, at once where the backend notices, else after
    `timeout`.

    Args:
        layout: of the buckets.
        backend: gloo, nccl or hccl.
        device: that the backend sends from.
        host: how engines reach this machine.
        timeout: seconds to wait for members, and for each broadcast.
    """

    def __init__(self, layout: BucketLayout, *, backend: str, device: torch.device, host: str, timeout: float) -> None:
        super().__init__(layout)
        self._backend = backend
        self._host = host
        self._timeout = timeout
        self._buffers = [torch.empty(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(self._places)]
        self._members: WeightReceivers | None = None
        self._group: ProcessGroup | None = None
        # One thread, so that broadcasts leave in the order of their buckets.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")

    async def connect(self, receivers: WeightReceivers, join: Join) -> None:
        if self._group is not None and receivers == self._members:
            return
        self.close()
        world_size = 1 + sum(receivers.workers)
        store = open_store(self._host, world_size, self._timeout)
        group = WeightGroup(
            f"agentrl-weights-{secrets.token_hex(6)}",
            f"{self._host}:{store.port}",
            self._backend,
            world_size,
            rank=1,
            timeout=self._timeout,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        mine = asyncio.get_running_loop().run_in_executor(self._thread, join_group, group, 0, store)
        try:
            await join(group)
            self._group = await mine
        finally:
            # Of members that do not come, the thread hears when the time is up; nobody waits for it.
            mine.cancel()
        self._members = receivers

    async def send(self, tensors: Iterable[tuple[str, torch.Tensor]], deliver: Deliver) -> int:
        if self._group is None:
            raise WeightTransferError("no engine is connected: call connect before send")
        try:
            return await super().send(tensors, deliver)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        group, self._group, self._members = self._group, None, None
        self._thread.shutdown(wait=False, cancel_futures=True)
        if group is not None:
            leave_group(group)

    def _fill(self, place: int, index: int, pieces: Pieces) -> Bucket:
        nbytes = bucket_nbytes(pieces)
        if nbytes > self._buffers[place].numel():  # for one tensor that may not be split
            self._buffers[place] = torch.empty(nbytes, dtype=torch.uint8, device=self._buffers[place].device)
        total = fill(self._buffers[place], pieces)
        return Bucket(index, "", nbytes, total, tuple(piece for piece, _ in pieces))

    async def _hand_over(self, place: int, bucket: Bucket, deliver: Deliver) -> None:
        group = self._group
        assert group is not None
        sending = asyncio.get_running_loop().run_in_executor(
            self._thread, broadcast, group, self._buffers[place][: bucket.nbytes]
        )
        delivery = asyncio.ensure_future(deliver(bucket))
        try:
            await asyncio.gather(delivery, sending)
        finally:
            delivery.cancel()
