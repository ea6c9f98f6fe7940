"""Metrics as (sum, count) pairs of scalar tensors: added over calls and ranks, divided once per step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl.algorithm.masking import masked, widened

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (sum, count), both scalars on the device of the inputs; the metric is sum / count."""

MAXIMA = frozenset({"mismatch/max", "mismatch/engine_max"})
"""Names whose pair is (maximum, 1), or (0, 0) without a token: over calls the largest counts, not the sum."""


def is_pair(value: object) -> bool:
    """Whether `value` can stand in `Metrics`."""
    match value:
        case (Tensor() as total, Tensor() as count):
            return total.dim() == 0 and count.dim() == 0
        case _:
            return False


def mean_pair(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The pair of the mean of `values` over the positions where `where` (bool, same shape) is True.

    Sums in fp32 or wider, without gradient and without host synchronisation.
    """
    values = widened(values.detach())
    return masked(values, where).sum(), where.sum().to(values.dtype)


def max_pair(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The pair of the largest of the non-negative `values` over the positions where `where` is True."""
    values = masked(widened(values.detach()), where)
    largest = values.max() if values.numel() else values.new_zeros(())
    return largest, where.any().to(values.dtype)


def effective_sample_size(weight: tuple[Tensor, Tensor], squared: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The pair of the effective sample size as a fraction, (sum w)^2 / (n * sum w^2), from two mean pairs."""
    return weight[0].square(), weight[1] * squared[0]


def merge(parts: Iterable[Metrics]) -> Metrics:
    """One set of pairs for the calls `parts` came from, as if they had been one call; stays on the device."""
    merged: Metrics = {}
    for part in parts:
        for name, (value, count) in part.items():
            if name not in merged:
                merged[name] = (value, count)
            elif name in MAXIMA:
                merged[name] = (torch.maximum(merged[name][0], value), torch.maximum(merged[name][1], count))
            else:
                merged[name] = (merged[name][0] + value, merged[name][1] + count)
    if {"mismatch/weight", "mismatch/weight_squared"} <= merged.keys():
        merged["mismatch/ess"] = effective_sample_size(merged["mismatch/weight"], merged["mismatch/weight_squared"])
    return merged


def summarise(metrics: Metrics) -> dict[str, float]:
    """sum / count of each pair, names without a count left out; the one host synchronisation of a step."""
    if not metrics:
        return {}
    pairs = torch.stack(
        [torch.stack([value.double().cpu(), count.double().cpu()]) for value, count in metrics.values()]
    )
    return {name: total / count for name, (total, count) in zip(metrics, pairs.tolist(), strict=True) if count > 0}
