"""What a critic learns: the return of each token, without moving too far from what it said before."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.aggregate import Totals, aggregate
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.masking import is_trained, masked, require_same_shape, widened
from agentrl.algorithm.metrics import Metrics, mean_pair


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    layout: Layout | None = None,
    totals: Totals | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Metrics]:
    """This call's share of the clipped value loss of an optimiser step, and its metrics.

    Of a token: max((v - R)^2, (clip(v) - R)^2) / 2, v clipped to `old_values` +- `cliprange_value`.

    Args:
        values: [B, T] values of the state before each trained token, with gradient.
        old_values: [B, T] the same when the advantages were computed.
        returns: [B, T] from `compute_advantages`.
        mask: [B, T], 1 on trained tokens; nothing at the other positions is read, NaN and inf included.
        cliprange_value: in the unit of the rewards.
        loss_agg_mode, layout, totals, scale: see `aggregate`.

    Returns:
        The loss, a scalar to be added over calls, and pairs over the trained tokens: `critic/value_mean`,
        `critic/clip_fraction` (tokens whose clipped term is the larger), `critic/error` (mean of (v - R)^2, from which
        with the variance of the returns comes the explained variance).

    Raises:
        ValueError: shapes that differ, or a range that is not positive.

    Source: Schulman et al., arXiv:1707.06347, and the reference implementation of PPO.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if cliprange_value <= 0:
        raise ValueError(f"cliprange_value is {cliprange_value}: pass a positive number")
    trained = is_trained(mask)
    values, old, target = (masked(widened(x), trained) for x in (values, old_values.detach(), returns.detach()))
    within = torch.maximum(torch.minimum(values, old + cliprange_value), old - cliprange_value)
    plain, clipped = (values - target).square(), (within - target).square()
    loss = aggregate(torch.maximum(plain, clipped) / 2, mask, loss_agg_mode, layout=layout, totals=totals, scale=scale)
    return loss, {
        "critic/value_mean": mean_pair(values, trained),
        "critic/clip_fraction": mean_pair((clipped > plain).float(), trained),
        "critic/error": mean_pair(plain, trained),
    }
