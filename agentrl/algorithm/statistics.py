"""Means that are exact where they have to be, and values brought to mean 0 and variance 1."""

from __future__ import annotations

import torch
from torch import Tensor

_VARIANCE_EPSILON = 1e-8


def means(values: Tensor, index: Tensor, weight: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Weighted mean of the [N] `values` at each index 0..length-1, and the sum of their weights; 0 where that is 0.

    What weighs nothing is not read. Relative to the smallest value, so that the mean of equals is exactly theirs.
    """
    counted = weight > 0
    values, index, weight = values[counted], index[counted], weight[counted]
    total = values.new_zeros(length).index_add(0, index, weight)
    least = values.new_zeros(length).scatter_reduce(0, index, values, "amin", include_self=False)
    excess = values.new_zeros(length).index_add(0, index, weight * (values - least[index]))
    return least + excess / torch.where(total > 0, total, 1.0), total


def whiten(values: Tensor, keep: Tensor) -> Tensor:
    """`values` [B, T] shifted and scaled to mean 0 and variance 1 over `keep` (bool), 0 elsewhere.

    Variance with Bessel's correction plus 1e-8. Equal values, or one alone, give exactly 0.
    """
    kept = values[keep]
    if not len(kept):
        return torch.zeros_like(values)
    mean, _ = means(kept, torch.zeros_like(kept, dtype=torch.long), torch.ones_like(kept), 1)
    centred = kept - mean
    variance = centred.square().sum() / max(len(kept) - 1, 1)
    return torch.zeros_like(values).masked_scatter(keep, centred / (variance + _VARIANCE_EPSILON).sqrt())
