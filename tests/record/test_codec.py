"""MessagePack and JSON round trips, of arrays of every kind and of the messages that cross processes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agentrl.record import Batch, Branch, Fate, Group, Trajectory, Turn
from agentrl.record.codec import decode, encode, from_json, to_json
from agentrl.record.protocols import Bucket, GenerateRequest, GenerateResult, RolloutStatus, TensorSlice

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")


def trajectory(episode_id: str = "g0.0", *, tokens: int = 3, reward: float = 1.0) -> Trajectory:
    branch = Branch(
        np.arange(tokens, dtype=np.int32),
        np.array([0] + [1] * (tokens - 1), np.uint8),
        np.linspace(0, -2, tokens, dtype=np.float32),
        np.array([-1] + [7] * (tokens - 1), np.int32),
        [Turn(1, tokens, 0.7, "stop", reward=0.25)],
        extras={"experts": np.arange(tokens * 2).reshape(tokens, 2).astype(np.uint8)},
        blobs=["image-0"],
    )
    return Trajectory(
        episode_id,
        "g0",
        "train-3",
        3,
        1,
        [branch],
        reward,
        reward_parts={"accuracy": 1.0},
        status="truncated",
        version_admitted=7,
        timings={"episode": 0.5},
        metrics={"calls": 2.0},
        info={"note": ["a", None, {"b": 1}]},
    )


def assert_same(one: object, other: object) -> None:
    """Equality that also compares arrays, their types and shapes."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:  # type: ignore[attr-defined]
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    )
)
def test_arrays_of_any_type_and_shape_survive_bit_for_bit(array: np.ndarray) -> None:
    copy = decode(encode(array), np.ndarray)
    assert (copy.dtype, copy.shape, copy.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert copy.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(12).reshape(3, 4).T, np.arange(10)[::3], np.arange(3, dtype=">i4"), np.asfortranarray(np.eye(3))],
    ids=["transposed", "strided", "big-endian", "fortran"],
)
def test_arrays_survive_whatever_their_layout_in_memory(array: np.ndarray) -> None:
    np.testing.assert_array_equal(decode(encode(array), np.ndarray), array)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.array([1j])], ids=str)
def test_an_array_of_another_type_is_refused_before_it_is_sent(array: np.ndarray) -> None:
    with pytest.raises(NotImplementedError, match="can't be sent"):
        encode(array)


@pytest.mark.parametrize("wire", [("object", (1,), b"\0" * 8), ("float32", (3,), b"\0" * 4), ("int32", (1,), b"\0")])
def test_a_damaged_array_is_refused(wire: tuple[str, tuple[int, ...], bytes]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(wire), np.ndarray)


MESSAGES = [
    GenerateRequest("g0.0:1", np.arange(5, dtype=np.int32), 7, 0.6, (1, 2), 2**63 - 1, min_version=3),
    GenerateResult("g0.0:1", np.array([5], np.int32), np.array([-0.1], np.float32), np.array([2], np.int32), "length"),
    Bucket(3, "/dev/shm/x", 12, 2**64 - 1, (TensorSlice("model.w", "bfloat16", (2, 3), 0, 128, 12),)),
    Batch(4, 9, [Group("g0", [trajectory()], 7)], {"reward/mean": 0.5}),
    RolloutStatus(1, 2, 1, {"trained": 1}, waiting_for="a batch"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_between_processes_survive(message: object) -> None:
    assert_same(decode(encode(message), type(message)), message)


def test_a_message_of_another_type_is_refused_naming_the_field() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        decode(encode({"request_id": "a", "token_ids": np.zeros(1), "max_tokens": "many"}), GenerateRequest)


def test_numpy_scalars_become_plain_numbers() -> None:
    assert decode(encode([np.float32(0.5), np.int64(3), np.bool_(True)]), list) == [0.5, 3, True]


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="object can't be sent"):
        encode({"x": object()})


def test_json_holds_arrays_as_lists() -> None:
    copy = from_json(to_json(trajectory()), Trajectory)
    assert b'"token_ids":[0,1,2]' in to_json(trajectory())
    assert copy.branches[0].versions.tolist() == [-1, 7, 7]
    assert copy.branches[0].extras["experts"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_fate_is_its_name() -> None:
    assert decode(encode({"fate": Fate.TRAINED}), dict) == {"fate": "trained"}
