"""Normalisation of rewards and of advantages, over the batch or within each group."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.masking import is_trained
from agentrl.algorithm.statistics import means
from agentrl.config.normalisation import NormConfig

__all__ = ["NormConfig", "normalise"]


@torch.no_grad()
def normalise(values: Tensor, where: Tensor, group: Tensor, config: NormConfig) -> Tensor:
    """(value - mean) / (std + eps) of the values that count, 0 elsewhere.

    Equal values give exactly 0, as does a value that is left out of a mean over nothing else. The standard deviation is
    taken around the mean that was subtracted; of a single value it is 1. In fp64.

    Args:
        values: any shape: one for each episode, or for each token.
        where: same shape, not 0 where a value counts.
        group: same shape, any integers: the group of each value.
        config: what to subtract and to divide by.

    Returns:
        In the dtype of `values`.

    Raises:
        ValueError: shapes that differ.

    Source: AReaL, arXiv:2505.24298.
    """
    if not values.shape == where.shape == group.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (values, where, group))
        raise ValueError(f"values, where and group have shapes {shapes}: pass one of each for every value")
    counted = is_trained(where)
    kept = values[counted].double()
    _, index = group[counted].unique(return_inverse=True)
    everything = torch.zeros_like(index)
    mean = torch.zeros_like(kept)
    if config.mean_level is not None:
        mean = _means(kept, index if config.mean_level == "group" else everything, config.mean_leave1out)
    result = kept - mean
    if config.std_level is not None:
        level = index if config.std_level == "group" else everything
        count = _sums(torch.ones_like(kept), level)
        divisor = (count - 1).clamp(min=1) if config.std_unbiased else count
        variance = torch.where(count > 1, _sums(result.square(), level) / divisor, 1.0)
        result = result / (variance.sqrt() + config.eps)
    return torch.zeros_like(values).masked_scatter(counted, result.to(values.dtype))


def _sums(values: Tensor, index: Tensor) -> Tensor:
    """The sum of the values with the same index, for each of them."""
    return values.new_zeros(len(values)).index_add(0, index, values)[index]


def _means(values: Tensor, index: Tensor, leave_one_out: bool) -> Tensor:
    """The mean of the values with the same index, for each of them; with `leave_one_out` without itself, if it is not
    alone."""
    mean, count = (part[index] for part in means(values, index, torch.ones_like(values), len(values)))
    if not leave_one_out:
        return mean
    return torch.where(count > 1, mean - (values - mean) / (count - 1).clamp(min=1), values)
