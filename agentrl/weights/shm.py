"""Weights through shared memory, to engines on the same machine."""

from __future__ import annotations

from pathlib import Path

from agentrl.record.protocols import Bucket
from agentrl.weights.bucket import BucketLayout, Pieces, bucket_nbytes, fill
from agentrl.weights.segment import Segment
from agentrl.weights.sender import WeightSender


class ShmSender(WeightSender):
    """Puts buckets into segments that receivers map.

    Args:
        directory: where the segments live; its owner removes it.
        bucket_bytes: size of a segment. A tensor may be larger and is then sent in slices.
    """

    def __init__(self, directory: Path, bucket_bytes: int, *, segments: int = 2) -> None:
        super().__init__(BucketLayout(bucket_bytes), places=segments)
        self._segments = [Segment.create(directory / f"bucket-{i}", bucket_bytes) for i in range(segments)]

    def _fill(self, place: int, index: int, pieces: Pieces) -> Bucket:
        segment, nbytes = self._segments[place], bucket_nbytes(pieces)
        slices = tuple(piece for piece, _ in pieces)
        return Bucket(index, str(segment.path), nbytes, fill(segment.tensor, pieces), slices)
