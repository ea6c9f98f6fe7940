"""Dataclasses with arrays to bytes and back: MessagePack on sockets, JSON in files. Never pickle."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = frozenset({"bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"})


def encode(value: Any) -> bytes:
    """MessagePack bytes of a dataclass, container or scalar; arrays as (dtype, shape, bytes)."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, type_: Any) -> Any:
    """The value of type `type_` that `encode` wrote.

    Raises:
        msgspec.ValidationError: the bytes hold something else; the message names the field.
    """
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.msgpack.Decoder(type_, dec_hook=_from_wire)
    return decoder.decode(data)


def to_json(value: Any) -> bytes:
    """One JSON object; arrays become lists."""
    return msgspec.json.encode(value, enc_hook=_to_json)


def from_json(data: bytes | str, type_: type[T]) -> T:
    """The value of type `type_` that `to_json` wrote. Arrays come back with the dtype their values suggest."""
    return msgspec.json.decode(data, type=type_, dec_hook=_from_json)


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise NotImplementedError(
                f"an array of {value.dtype} can't be sent: use one of {', '.join(sorted(_DTYPES))}"
            )
        return (value.dtype.name, value.shape, value.astype(value.dtype.newbyteorder("="), order="C").tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} can't be sent: use numbers, strings, containers or arrays")


def _from_wire(type_: type, value: Any) -> Any:
    if type_ is np.ndarray:
        dtype, shape, data = value
        if dtype not in _DTYPES:
            raise ValueError(f"array of dtype {dtype!r}")
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    raise NotImplementedError(type_.__name__)


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} can't be written as JSON")


def _from_json(type_: type, value: Any) -> Any:
    if type_ is np.ndarray:
        return np.asarray(value)
    raise NotImplementedError(type_.__name__)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoders: dict[Any, msgspec.msgpack.Decoder] = {}
