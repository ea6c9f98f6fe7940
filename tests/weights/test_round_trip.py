"""What arrives is what was sent, bit by bit, whatever the types, shapes and bucket sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.record import WeightTransferError
from agentrl.weights.bucket import BucketLayout, pack

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)
Transfer = Callable[..., int]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits as a tensor: NaN patterns and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tensors, st.integers(1, 700))
def test_any_mix_of_tensors_arrives_bit_by_bit(transfer: Transfer, specs: list, bucket_bytes: int) -> None:
    sent, received = {}, {}
    for number, (shape, dtype, transposed) in enumerate(specs):
        tensor = noise(shape, dtype, number)
        sent[f"t{number}"] = tensor.mT if transposed and tensor.ndim >= 2 else tensor
        received[f"t{number}"] = torch.empty(sent[f"t{number}"].shape, dtype=dtype)
    transfer(sent, received, bucket_bytes)
    for name, tensor in sent.items():
        assert as_bytes(received[name]) == as_bytes(tensor)


def test_three_bfloat16_before_a_float32(transfer: Transfer) -> None:
    sent = {"a": noise((3,), torch.bfloat16), "b": noise((5, 7), torch.float32), "c": noise((1,), torch.int8)}
    received = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    transfer(sent, received, 64)
    assert all(as_bytes(received[name]) == as_bytes(sent[name]) for name in sent)


@pytest.mark.parametrize("bucket_bytes", [1, 7, 63, 64, 65, 4095, 4096, 4097, 1 << 20])
def test_a_tensor_larger_than_a_bucket_is_cut(transfer: Transfer, bucket_bytes: int) -> None:
    size = 50 if bucket_bytes == 1 else 1024
    sent = {"small": noise((3,), torch.float16), "large": noise((size,), torch.float32, 1)}
    received = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    transfer(sent, received, bucket_bytes)
    assert all(as_bytes(received[name]) == as_bytes(sent[name]) for name in sent)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8), st.integers(1, 500))
def test_slices_lie_apart_within_the_bucket_and_cover_every_tensor_once(specs: list, bucket_bytes: int) -> None:
    named = [(f"t{i}", torch.zeros(shape, dtype=dtype)) for i, (shape, dtype) in enumerate(specs)]
    covered: dict[str, int] = {}
    for bucket in pack(named, BucketLayout(bucket_bytes)):
        end = 0
        for piece, _ in bucket:
            assert piece.bucket_offset >= end and piece.bucket_offset % 64 == 0
            end = piece.bucket_offset + piece.nbytes
            assert end <= bucket_bytes
            assert piece.tensor_offset == covered.get(piece.name, 0)
            covered[piece.name] = piece.tensor_offset + piece.nbytes
    assert covered == {name: tensor.numel() * tensor.element_size() for name, tensor in named}


def test_parameters_of_another_type_get_the_converted_values(transfer: Transfer) -> None:
    sent = {"a": torch.randn(33, 7), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 3).double()}
    types = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16}
    received = {name: torch.zeros(tensor.shape, dtype=types[name]) for name, tensor in sent.items()}
    transfer(sent, received, 100)
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor.to(types[name]))


def test_parameters_that_are_views_are_written_in_place(transfer: Transfer) -> None:
    storage = torch.zeros(4, 6)
    parameter = torch.nn.Parameter(storage.t(), requires_grad=True)
    sent = {"w": torch.randn(6, 4)}
    transfer(sent, {"w": parameter}, 20)
    assert torch.equal(parameter.detach(), sent["w"])
    assert torch.equal(storage, sent["w"].t())


def test_nothing_to_send_is_no_error(transfer: Transfer) -> None:
    assert transfer({}, {}) == 0


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ({"a": (2,)}, {"a": (2,), "b.weight": (3,)}, "1 tensors did not arrive whole: b.weight"),
        ({"a": (2,), "extra": (2,)}, {"a": (2,)}, "no tensor 'extra'"),
        ({"a": (2, 3)}, {"a": (3, 2)}, r"a: sent shape \(2, 3\), the model has \(3, 2\)"),
        ({"a": (2,)}, {"a": ()}, r"a: sent shape \(2,\)"),
        ({"a": (0,)}, {"a": (2,)}, r"a: sent shape \(0,\)"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error_that_names_it(
    sent: dict[str, tuple], received: dict[str, tuple], message: str, transfer: Transfer
) -> None:
    with pytest.raises(WeightTransferError, match=message):
        transfer(
            {name: torch.zeros(shape) for name, shape in sent.items()}, {k: torch.ones(v) for k, v in received.items()}
        )
