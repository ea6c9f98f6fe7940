"""The sending end: named tensors in buckets, the next one filled while the last one is read."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator

import torch

from agentrl.record.protocols import Bucket, WeightGroup, WeightReceivers
from agentrl.weights.bucket import BucketLayout, Pieces, pack

Deliver = Callable[[Bucket], Awaitable[None]]
Join = Callable[[WeightGroup], Awaitable[None]]


class WeightSender(ABC):
    """Sends weights through a few places for buckets, filled in turn.

    While the receivers read one place the next one is filled; a place is used again when `deliver` has returned for
    it. Memory needed is that of the places, however large the model. Only the trainer's rank 0 has a sender.

    Args:
        places: how many buckets are on their way at a time.
    """

    def __init__(self, layout: BucketLayout, *, places: int = 2) -> None:
        self.layout = layout
        self._places = places

    async def connect(self, receivers: WeightReceivers, join: Join) -> None:
        """Prepares a transfer to these receivers, before `send`; `join` has them enter a process group.

        Raises:
            WeightTransferError: they can't be reached.
        """
        return  # whoever finds a bucket by its name needs no preparation

    async def send(self, tensors: Iterable[tuple[str, torch.Tensor]], deliver: Deliver) -> int:
        """Sends `tensors` and returns the number of bytes.

        Every trainer rank advances `tensors` (gathering shards is a collective). `deliver` returns when all receivers
        have read a bucket. The first failure ends the transfer.
        """
        pending: list[asyncio.Task[None] | None] = [None] * self._places
        total = 0
        try:
            buckets = pack(tensors, self.layout)
            for index in itertools.count():
                place = index % self._places
                task = pending[place]
                if task is not None:
                    await task
                bucket = await asyncio.to_thread(self._fill_next, place, index, buckets)
                if bucket is None:
                    break
                total += bucket.nbytes
                pending[place] = asyncio.create_task(self._hand_over(place, bucket, deliver))
            await asyncio.gather(*(task for task in pending if task is not None))
        finally:
            deliveries = [task for task in pending if task is not None]
            for task in deliveries:
                task.cancel()
            await asyncio.gather(*deliveries, return_exceptions=True)
        return total

    def close(self) -> None:
        """Gives back what the transfers held."""
        return

    def _fill_next(self, place: int, index: int, buckets: Iterator[Pieces]) -> Bucket | None:
        pieces = next(buckets, None)
        return None if pieces is None else self._fill(place, index, pieces)

    @abstractmethod
    def _fill(self, place: int, index: int, pieces: Pieces) -> Bucket:
        """Puts a bucket's content where receivers find it; runs in a thread."""

    async def _hand_over(self, place: int, bucket: Bucket, deliver: Deliver) -> None:
        await deliver(bucket)
