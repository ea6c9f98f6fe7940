"""Weights through files that trainer and engines both see: safetensors, complete or not there at all."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import torch

from agentrl.record.protocols import Bucket, TensorSlice
from agentrl.weights.bucket import BucketLayout, Pieces, checksum
from agentrl.weights.sender import Deliver, WeightSender


class DiskSender(WeightSender):
    """Writes each bucket as a safetensors file of its own, whole tensors in it, and removes it when it was read.

    A file appears under its name when all of it is on the disk, so no reader ever sees half of one.

    Args:
        directory: on a file system that every engine sees under the same path; its owner removes it.
        bucket_bytes: size of a file, roughly; a larger tensor has a larger file to itself.
    """

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        super().__init__(BucketLayout(bucket_bytes, split=False))
        self._directory = directory
        self._transfers = 0
        directory.mkdir(parents=True, exist_ok=True)

    def _fill(self, place: int, index: int, pieces: Pieces) -> Bucket:
        self._transfers += index == 0
        # No name is used twice: whoever still maps an older file must not find another one behind its name.
        path = self._directory / f"weights-{os.getpid()}-{self._transfers}-{index:05}.safetensors"
        write_atomically(path, {piece.name: tensor for piece, tensor in pieces})
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        return Bucket(index, str(path), content.numel(), checksum(content), tuple(slices_in(content)))

    async def _hand_over(self, place: int, bucket: Bucket, deliver: Deliver) -> None:
        try:
            await deliver(bucket)
        finally:
            await asyncio.to_thread(Path(bucket.segment).unlink, missing_ok=True)


def write_atomically(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file that appears complete, even if the machine fails meanwhile."""
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.rename(path)


def slices_in(content: torch.Tensor) -> list[TensorSlice]:
    """Where the tensors of a safetensors file lie in it.

    Args:
        content: uint8 `[N]`, the file.
    """
    length = int.from_bytes(bytes(content[:8].tolist()), "little")
    header = json.loads(content[8 : 8 + length].numpy().tobytes())
    return [
        TensorSlice(
            name,
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            0,
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]


_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}  # fmt: skip
"""torch's names for the types of the safetensors format."""
