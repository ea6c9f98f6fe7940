"""The receiving end: bytes out of buckets, into the parameters of a model."""

from __future__ import annotations

import torch
import xxhash

from agentrl.record import WeightTransferError
from agentrl.record.protocols import Bucket, TensorSlice
from agentrl.weights.segment import Segment


class BucketReceiver:
    """Copies an update into parameters in place, and knows whether all of it arrived.

    Bytes are copied as bytes: no view of a bucket is ever taken in the tensor's own type, so alignment within the
    bucket does not matter. Parameters of another dtype than what was sent are assembled first, then converted.

    Args:
        parameters: the tensors to write to, by name; tied ones once.
    """

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._segments: dict[str, Segment] = {}
        self._missing: dict[str, int] = {}
        self._staged: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Begins an update; whatever an unfinished one left is forgotten."""
        self._missing = {}
        self._staged = {}
        self._expected = set(self._parameters)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Copies a bucket's content; the bucket may be reused afterwards.

        Raises:
            WeightTransferError: the bytes are not there or not those that were sent, or a tensor is unknown or of
                another shape.
        """
        segment = self._segments.get(bucket.segment)
        if segment is None:
            segment = self._segments[bucket.segment] = _attach(bucket)
        data = segment.tensor[: bucket.nbytes]
        checksum = xxhash.xxh3_64_intdigest(segment.view[: bucket.nbytes])
        if checksum != bucket.checksum:
            raise WeightTransferError(f"bucket {bucket.index}: checksum {checksum:016x}, sent {bucket.checksum:016x}")
        for piece in bucket.slices:
            self._copy(piece, data)

    def finish(self) -> None:
        """Ends the update.

        Raises:
            WeightTransferError: tensors are missing or incomplete; the parameters are then a mixture.
        """
        unfinished = sorted(self._expected | {name for name, left in self._missing.items() if left})
        if unfinished:
            shown = ", ".join(unfinished[:5])
            raise WeightTransferError(f"{len(unfinished)} tensors did not arrive whole: {shown}")

    def _copy(self, piece: TensorSlice, data: torch.Tensor) -> None:
        parameter = self._parameters.get(piece.name)
        if parameter is None:
            raise WeightTransferError(f"the model has no tensor {piece.name!r}")
        if tuple(parameter.shape) != tuple(piece.shape):
            raise WeightTransferError(f"{piece.name}: sent shape {piece.shape}, the model has {tuple(parameter.shape)}")
        dtype = getattr(torch, piece.dtype)
        direct = parameter.dtype == dtype and parameter.is_contiguous()
        target = parameter if direct else self._staged.get(piece.name)
        if target is None:
            target = self._staged[piece.name] = torch.empty(piece.shape, dtype=dtype, device=parameter.device)
        if piece.nbytes:
            as_bytes = target.detach().view(-1).view(torch.uint8)
            source = data[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            as_bytes[piece.tensor_offset : piece.tensor_offset + piece.nbytes].copy_(source)
        left = self._missing.get(piece.name, target.numel() * target.element_size()) - piece.nbytes
        self._missing[piece.name] = left
        self._expected.discard(piece.name)
        if not left and not direct:
            parameter.copy_(self._staged.pop(piece.name))


def _attach(bucket: Bucket) -> Segment:
    try:
        return Segment.attach(bucket.segment)
    except (OSError, ValueError) as error:
        raise WeightTransferError(f"bucket {bucket.index}: no shared memory at {bucket.segment}: {error}") from error
