"""The format of buckets: how tensors are cut into them, and how damage is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from agentrl.record.protocols import TensorSlice

Pieces = list[tuple[TensorSlice, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """How tensors lie in buckets.

    Attributes:
        nbytes: of a bucket, at most.
        alignment: slices start at multiples of it.
        split: whether a tensor may lie in several buckets; if not, one that is larger than a bucket gets a larger one
            to itself.
        one_dtype: whether a bucket's tensors are all of the same type.
    """

    nbytes: int
    alignment: int = 64
    split: bool = True
    one_dtype: bool = False


def pack(tensors: Iterable[tuple[str, torch.Tensor]], layout: BucketLayout) -> Iterator[Pieces]:
    """Cuts tensors into buckets: for each, which bytes of which tensor go where."""
    bucket: Pieces = []
    used = 0
    for name, tensor in tensors:
        tensor = tensor.detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        sent = 0
        while sent < nbytes or (sent == 0 and nbytes == 0):
            used = -(-used // layout.alignment) * layout.alignment
            wanted = 1 if layout.split else nbytes
            mixed = layout.one_dtype and bool(bucket) and bucket[-1][0].dtype != dtype
            if bucket and (mixed or used + wanted > layout.nbytes):
                yield bucket
                bucket, used = [], 0
            size = min(nbytes - sent, layout.nbytes - used) if layout.split else nbytes
            bucket.append((TensorSlice(name, dtype, tuple(tensor.shape), sent, used, size), tensor))
            sent += size
            used += size
            if nbytes == 0:
                break
    if bucket:
        yield bucket


def bucket_nbytes(pieces: Pieces) -> int:
    """Bytes that a bucket of these pieces has."""
    last = pieces[-1][0]
    return last.bucket_offset + last.nbytes


def fill(target: torch.Tensor, pieces: Pieces) -> int:
    """Copies the pieces' bytes to their places; returns the checksum of the bucket.

    Args:
        target: uint8 `[N]`, on any device.
    """
    total = Checksum(target[: bucket_nbytes(pieces)])
    for piece, tensor in pieces:
        source = as_bytes(tensor)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
        for start in range(0, piece.nbytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, piece.nbytes)
            target[piece.bucket_offset + start : piece.bucket_offset + end].copy_(source[start:end])
            total.add_until(piece.bucket_offset + end)
    return total.value()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 `[N]`."""
    return tensor.detach().view(-1).view(torch.uint8)


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The checksum of each tensor, in hexadecimal, by its name."""
    return {name: f"{checksum(as_bytes(tensor.contiguous())):016x}" for name, tensor in tensors}


def checksum(data: torch.Tensor) -> int:
    """Of bytes in main memory xxh3-64; on a device a sum of products that it computes itself, so that the bytes need
    not leave it. Sender and receiver hold a bucket on the same kind of device.

    Args:
        data: uint8 `[N]`, contiguous.
    """
    return Checksum(data).value()


CHUNK_BYTES = 2**20
"""What is copied at a time. In main memory its checksum is computed while it is still in the processor's cache."""


class Checksum:
    """The checksum of bytes that are read, or written, from their beginning to their end.

    Args:
        data: uint8 `[N]`, contiguous.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._bytes: Any = data.numpy() if data.device.type == "cpu" else None
        self._hash = xxhash.xxh3_64()
        self._done = 0

    def add_until(self, end: int) -> None:
        """The bytes before `end` are there."""
        if self._bytes is not None and end > self._done:
            self._hash.update(self._bytes[self._done : end])
            self._done = end

    def value(self) -> int:
        """The checksum of all bytes."""
        if self._bytes is None:
            return device_checksum(self._data)
        self.add_until(len(self._bytes))
        return self._hash.intdigest()


_MULTIPLIER = 6364136223846793005
_CHUNK_WORDS = 2**20


def device_checksum(data: torch.Tensor) -> int:
    """A checksum of bytes by integer arithmetic alone: any changed, moved or swapped word changes it.

    Each 32-bit word is multiplied by an odd number that depends on its position, all modulo 2**64.

    Args:
        data: uint8 `[N]`, contiguous.
    """
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, padded.numel() // 4, _CHUNK_WORDS):
        words = padded[4 * start : 4 * (start + _CHUNK_WORDS)].view(torch.int32).to(torch.int64)
        positions = torch.arange(start, start + words.numel(), dtype=torch.int64, device=data.device)
        total += ((words + 2**31) * (positions * _MULTIPLIER | 1)).sum()
    return (int(total) + data.numel()) % 2**64
