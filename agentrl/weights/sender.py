"""The sending end: named tensors into buckets in shared memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import torch
import xxhash

from agentrl.record.protocols import Bucket, TensorSlice
from agentrl.weights.segment import Segment

Deliver = Callable[[Bucket], Awaitable[None]]

_ALIGNMENT = 64


class ShmSender:
    """Sends weights through a few segments of shared memory, filled in turn.

    While the receivers read one segment the next one is filled; a segment is used again when `deliver` has returned
    for it. Memory needed is `segments * bucket_bytes`, however large the model.

    Args:
        directory: where the segments live; its owner removes it.
        bucket_bytes: size of a segment. A tensor may be larger and is then sent in slices.
    """

    def __init__(self, directory: Path, bucket_bytes: int, *, segments: int = 2) -> None:
        self._bucket_bytes = bucket_bytes
        self._segments = [Segment.create(directory / f"bucket-{i}", bucket_bytes) for i in range(segments)]

    async def send(self, tensors: Iterable[tuple[str, torch.Tensor]], deliver: Deliver) -> int:
        """Sends `tensors` and returns the number of bytes.

        Every trainer rank advances `tensors` (gathering shards is a collective); only the sending rank has this
        object. The first failed delivery ends the transfer.
        """
        pending: list[asyncio.Task[None] | None] = [None] * len(self._segments)
        total = 0
        try:
            buckets = pack(tensors, self._bucket_bytes)
            for index in itertools.count():
                slices = await asyncio.to_thread(next, buckets, None)
                if slices is None:
                    break
                turn = index % len(self._segments)
                task = pending[turn]
                if task is not None:
                    await task
                segment = self._segments[turn]
                bucket = await asyncio.to_thread(_fill, segment, index, slices)
                total += bucket.nbytes
                pending[turn] = asyncio.ensure_future(deliver(bucket))
            await asyncio.gather(*(task for task in pending if task is not None))
        finally:
            deliveries = [task for task in pending if task is not None]
            for task in deliveries:
                task.cancel()
            await asyncio.gather(*deliveries, return_exceptions=True)
        return total


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[TensorSlice, torch.Tensor]]]:
    """Cuts tensors into buckets: for each, which bytes of which tensor go where.

    Slices start at multiples of 64 bytes; a tensor that does not fit is split over buckets.
    """
    bucket: list[tuple[TensorSlice, torch.Tensor]] = []
    used = 0
    for name, tensor in tensors:
        tensor = tensor.detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        sent = 0
        while sent < nbytes or (sent == 0 and nbytes == 0):
            used = -(-used // _ALIGNMENT) * _ALIGNMENT
            if used >= bucket_bytes:
                yield bucket
                bucket, used = [], 0
            size = min(nbytes - sent, bucket_bytes - used)
            bucket.append((TensorSlice(name, dtype, tuple(tensor.shape), sent, used, size), tensor))
            sent += size
            used += size
            if nbytes == 0:
                break
    if bucket:
        yield bucket


def _fill(segment: Segment, index: int, slices: list[tuple[TensorSlice, torch.Tensor]]) -> Bucket:
    for piece, tensor in slices:
        if piece.nbytes:
            source = tensor.view(-1).view(torch.uint8)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            segment.tensor[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(source)
    last = slices[-1][0]
    nbytes = last.bucket_offset + last.nbytes
    checksum = xxhash.xxh3_64_intdigest(segment.view[:nbytes])
    return Bucket(index, str(segment.path), nbytes, checksum, tuple(piece for piece, _ in slices))
