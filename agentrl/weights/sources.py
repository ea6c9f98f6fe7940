"""Where a receiver finds the bytes of a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.record import WeightTransferError
from agentrl.record.protocols import Bucket, WeightGroup
from agentrl.weights.process_group import broadcast, join_group, leave_group
from agentrl.weights.segment import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SEGMENTS = 4
"""Files that stay mapped: more than shared memory segments are used in turn."""


class BucketSource:
    """Reads buckets, from files (in shared memory or on disk) and over a process group.

    Args:
        device: of the group's buffer.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._segments: dict[str, Segment] = {}
        self._group: ProcessGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def join(self, group: WeightGroup, worker: int = 0) -> None:
        """Enters a process group, as the engine's worker of that number; returns when all members have.

        Raises:
            WeightTransferError: they were not in time.
        """
        self.leave()
        self._group = join_group(group, group.rank + worker)

    def leave(self) -> None:
        """Ends the part in a process group."""
        group, self._group = self._group, None
        if group is not None:
            leave_group(group)

    def read(self, bucket: Bucket) -> torch.Tensor:
        """Its bytes, uint8 `[nbytes]`, there until the next call.

        Raises:
            WeightTransferError: they can't be had.
        """
        if bucket.segment:
            return self._segment(bucket).tensor[: bucket.nbytes]
        if self._group is None:
            raise WeightTransferError(f"bucket {bucket.index} comes over a process group that this engine is not in")
        if self._buffer.numel() < bucket.nbytes:
            self._buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        data = self._buffer[: bucket.nbytes]
        try:
            broadcast(self._group, data)
        except WeightTransferError:
            self.leave()
            raise
        return data

    def _segment(self, bucket: Bucket) -> Segment:
        segment = self._segments.get(bucket.segment)
        if segment is None:
            try:
                segment = Segment.attach(bucket.segment)
            except (OSError, ValueError) as error:
                raise WeightTransferError(
                    f"bucket {bucket.index}: no shared memory or file at {bucket.segment}: {error}. An engine on "
                    "another machine needs weights.transport = collective, or disk with a weights.directory it sees"
                ) from error
            while len(self._segments) >= _SEGMENTS:
                del self._segments[next(iter(self._segments))]
            self._segments[bucket.segment] = segment
        return segment
