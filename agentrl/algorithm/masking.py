"""Masked positions: their values never reach a result or a gradient, whatever they hold."""

from __future__ import annotations

import torch
from torch import Tensor


def is_trained(mask: Tensor) -> Tensor:
    """The boolean form of a loss mask: True where `mask` is not 0, shape as `mask`."""
    return mask if mask.dtype == torch.bool else mask != 0


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """`values` where `keep` (bool, same shape) is True, 0 elsewhere.

    Selecting, unlike multiplying by the mask, also drops NaN and inf, and the gradient of a position left out
    is exactly 0. Apply it to the inputs of `exp`, `*` and `square`, not only to their results: the backward
    of those multiplies by the value itself, and 0 * inf is NaN.
    """
    return torch.where(keep, values, values.new_zeros(()))


def widened(values: Tensor) -> Tensor:
    """`values` in fp32, or as they are if that is wider: sums and products of many half-precision numbers go wrong."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def require_same_shape(**tensors: Tensor | None) -> None:
    """Checks that the named `[B, T]` tensors agree; None stands for an argument that was not passed.

    Raises:
        ValueError: a tensor is not two-dimensional, or two shapes differ.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    reference, expected = next((name, tuple(tensor.shape)) for name, tensor in present.items())
    if len(expected) != 2:
        raise ValueError(f"{reference} has shape {list(expected)}: pass [B, T], rows of tokens")
    for name, tensor in present.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} but {reference} has {list(expected)}: "
                "every per-token tensor holds one value for each position of the same rows"
            )
