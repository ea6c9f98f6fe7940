"""The receiving end: bytes out of buckets, into the parameters of a model or into the hands of whoever loads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch

from agentrl.record import WeightTransferError
from agentrl.record.protocols import Bucket, TensorSlice
from agentrl.weights.bucket import CHUNK_BYTES, Checksum, as_bytes
from agentrl.weights.sources import BucketSource

_SHOWN = 5


class BucketReceiver(ABC):
    """Takes an update apart, and knows whether all of it arrived.

    Bytes are copied as bytes: no view of a bucket is ever taken in the tensor's own type, so alignment within the
    bucket does not matter. Damage is noticed when a bucket has been copied: whoever writes to parameters in place has
    a mixture until an update is whole, in any case.

    Args:
        source: where the buckets' bytes are; by default in files.
        expected: names that an update has to bring.
    """

    def __init__(self, source: BucketSource | None = None, expected: Iterable[str] = ()) -> None:
        self.source = source or BucketSource()
        self._all = frozenset(expected)
        self._missing: dict[str, int] = {}
        self._next = 0
        self._expected = set(self._all)

    def start(self) -> None:
        """Begins an update; whatever an unfinished one left is forgotten."""
        self._missing = {}
        self._next = 0
        self._expected = set(self._all)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Takes a bucket's content; the bucket may be reused afterwards.

        Raises:
            WeightTransferError: the bytes are not there or not those that were sent, or a tensor is unknown or of
                another shape.
        """
        if bucket.index != self._next:
            raise WeightTransferError(f"bucket {bucket.index} came where bucket {self._next} was due")
        data = self.source.read(bucket)
        self._next += 1
        total = Checksum(data)
        for piece in bucket.slices:
            self._copy(piece, data, total)
        found = total.value()
        if found != bucket.checksum:
            raise WeightTransferError(f"bucket {bucket.index}: checksum {found:016x}, sent {bucket.checksum:016x}")

    def finish(self) -> None:
        """Ends the update.

        Raises:
            WeightTransferError: tensors are missing or incomplete; the parameters are then a mixture.
        """
        unfinished = sorted(self._expected | {name for name, left in self._missing.items() if left})
        if unfinished:
            shown = ", ".join(unfinished[:_SHOWN])
            raise WeightTransferError(f"{len(unfinished)} tensors did not arrive whole: {shown}")

    def _copy(self, piece: TensorSlice, data: torch.Tensor, total: Checksum) -> None:
        target = self._target(piece)
        place = as_bytes(target)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
        source = data[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
        for start in range(0, piece.nbytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, piece.nbytes)
            total.add_until(piece.bucket_offset + end)
            place[start:end].copy_(source[start:end])
        left = self._missing.get(piece.name, target.numel() * target.element_size()) - piece.nbytes
        self._missing[piece.name] = left
        self._expected.discard(piece.name)
        if not left:
            self._complete(piece.name)

    @abstractmethod
    def _target(self, piece: TensorSlice) -> torch.Tensor:
        """The contiguous tensor, of the sent type and shape, that the piece's bytes go to.

        Raises:
            WeightTransferError: there is no place for such a tensor.
        """

    @abstractmethod
    def _complete(self, name: str) -> None:
        """All bytes of a tensor are there."""


class ParameterReceiver(BucketReceiver):
    """Copies an update into parameters in place. Those of another dtype than what was sent are assembled first, then
    converted.

    Args:
        parameters: the tensors to write to, by name; tied ones once.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], source: BucketSource | None = None) -> None:
        super().__init__(source, parameters)
        self._parameters = parameters
        self._staged: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        super().start()
        self._staged = {}

    def _target(self, piece: TensorSlice) -> torch.Tensor:
        parameter = self._parameters.get(piece.name)
        _check_shape(piece, None if parameter is None else tuple(parameter.shape))
        assert parameter is not None
        dtype = getattr(torch, piece.dtype)
        if parameter.dtype == dtype and parameter.is_contiguous():
            return parameter
        if piece.name not in self._staged:
            self._staged[piece.name] = torch.empty(piece.shape, dtype=dtype, device=parameter.device)
        return self._staged[piece.name]

    def _complete(self, name: str) -> None:
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._parameters[name].copy_(staged)


class LoadingReceiver(BucketReceiver):
    """Assembles whole tensors and hands them on, those that a bucket completes together.

    Args:
        load: takes tensors by name; they are its own to keep.
        expected: shapes of what an update has to bring, by name; None lets `load` judge what comes.
        device: where they are assembled.
    """

    def __init__(
        self,
        load: Callable[[list[tuple[str, torch.Tensor]]], None],
        source: BucketSource | None = None,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(source, expected or ())
        self._shapes = dict(expected or {})
        self._load = load
        self._device = device
        self._parts: dict[str, torch.Tensor] = {}
        self._whole: list[tuple[str, torch.Tensor]] = []

    def start(self) -> None:
        super().start()
        self._parts, self._whole = {}, []

    def receive(self, bucket: Bucket) -> None:
        super().receive(bucket)
        whole, self._whole = self._whole, []
        if whole:
            self._load(whole)

    def _target(self, piece: TensorSlice) -> torch.Tensor:
        if self._shapes:
            _check_shape(piece, self._shapes.get(piece.name))
        part = self._parts.get(piece.name)
        if part is None:
            dtype = getattr(torch, piece.dtype)
            part = self._parts[piece.name] = torch.empty(piece.shape, dtype=dtype, device=self._device)
        return part

    def _complete(self, name: str) -> None:
        self._whole.append((name, self._parts.pop(name)))


def _check_shape(piece: TensorSlice, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise WeightTransferError(f"the model has no tensor {piece.name!r}")
    if shape != tuple(piece.shape):
        raise WeightTransferError(f"{piece.name}: sent shape {piece.shape}, the model has {shape}")
