"""Rollout correction: importance weights and rejection for the gap between sampling and training policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.layout import Layout
from agentrl.algorithm.masking import is_trained, masked, require_same_shape, widened
from agentrl.algorithm.metrics import Metrics, effective_sample_size, max_pair, mean_pair
from agentrl.config.correction import RejectionStatistic, RolloutCorrectionConfig

__all__ = ["LOG_RATIO_LIMIT", "Correction", "RolloutCorrectionConfig", "engine_mismatch", "rollout_correction"]

LOG_RATIO_LIMIT = 20.0
"""Nats. Log ratios are clamped to +- this before `exp`, which then stays below 5e8 and cannot overflow."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What `rollout_correction` hands to the loss; no gradient flows through any of it.

    Attributes:
        weights: [B, T] importance weights, 0 at masked positions; None where the config asks for none.
        mask: [B, T] the mask without the rejected tokens. It selects; denominators use the mask before.
        metrics: `mismatch/...` pairs.
    """

    weights: Tensor | None
    mask: Tensor
    metrics: Metrics


@torch.no_grad()
def rollout_correction(
    *,
    prox_logp: Tensor,
    behav_logp: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    layout: Layout | None = None,
) -> Correction:
    """Weights, accepted tokens and mismatch metrics from l = prox_logp - behav_logp.

    Weights are exp(l) of a token, or of the sum over its sequence, the exponent clamped to +-20 after the sum,
    then truncated above (TIS) or set to 0 outside a band (IcePop). A token stays in the mask if every
    statistic in `rollout_rs` is within its bounds (those clamp each token's l to +-20 first) and, with `m2_threshold`,
    if it is not among the tokens of largest l^2 that have to go until the mean l^2 is below it. Weights and
    statistics use all trained tokens, whatever rejection leaves. Batch normalisation and
    `m2_threshold` are over this call: call it on the whole batch of the optimiser step.

    Args:
        prox_logp: [B, T] log-probs (nats) of the policy that anchors the update; under bypass with REINFORCE
            those of the current policy.
        behav_logp: [B, T] log-probs recorded when the tokens were sampled.
        mask: [B, T], 1 on trained tokens; values elsewhere are ignored, NaN and inf included.
        layout: the sequences of packed rows; None means that row i is sequence i.

    Returns:
        A `Correction`. Its metrics, over trained tokens unless said otherwise: `mismatch/kl` (mean of -l),
        `mismatch/k3` (mean of e^l - 1 - l), `mismatch/max` (largest |l|; a maximum), `mismatch/chi2_token`
        and `mismatch/chi2_seq` (mean of r^2 - 1, of a token and of a sequence), `mismatch/ppl_ratio` (mean
        over sequences of exp(-mean l)), `mismatch/weight` and `mismatch/weight_squared` (means; of r where
        no weight is applied), `mismatch/ess` (effective sample size as a fraction, from those two),
        `mismatch/truncated_fraction` (weights outside their bound), `mismatch/rejected_fraction` and
        `mismatch/rejected_sequence_fraction` (sequences that lost a token).

    Raises:
        ValueError: shapes that differ.

    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch", 2025; truncation: Ionides, "Truncated Importance Sampling", 2008.
    """
    require_same_shape(
        prox_logp=prox_logp, behav_logp=behav_logp, mask=mask, sequence=layout.sequence if layout else None
    )
    trained = is_trained(mask)
    layout = layout or Layout.rows(mask)
    log_ratio = masked(widened(prox_logp) - widened(behav_logp), trained)
    ratio = _importance_ratio(log_ratio, trained, layout, config.rollout_is)
    bounded, within = _bound(ratio, config)
    weights = _normalise(bounded, trained, layout, config) if config.rollout_is else None
    kept = trained & _accepted(log_ratio, trained, layout, config)
    if config.m2_threshold is not None:
        kept = kept & _below_second_moment(log_ratio, trained, config.m2_threshold)

    metrics = _mismatch(log_ratio, trained, layout)
    metrics |= _weight_metrics(ratio if weights is None else weights, trained)
    truncated = trained & ~within if weights is not None else torch.zeros_like(trained)
    metrics["mismatch/truncated_fraction"] = mean_pair(truncated.float(), trained)
    metrics |= _rejection_metrics(kept, trained, layout)
    return Correction(weights, masked(mask, kept), metrics)


@torch.no_grad()
def engine_mismatch(*, logp: Tensor, behav_logp: Tensor, mask: Tensor) -> Metrics:
    """What engine and trainer compute differently: the mismatch without any staleness.

    Args:
        logp: [B, T] log-probs (nats) of the trainer's current policy.
        behav_logp: [B, T] log-probs recorded when the tokens were sampled.
        mask: [B, T], nonzero on trained tokens that the current policy itself sampled.

    Returns:
        `mismatch/engine_k3` (mean of e^l - 1 - l with l = logp - behav_logp) and `mismatch/engine_max` (largest |l|).

    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(logp=logp, behav_logp=behav_logp, mask=mask)
    fresh = is_trained(mask)
    log_ratio = masked(widened(logp) - widened(behav_logp), fresh)
    return {
        "mismatch/engine_k3": mean_pair(_k3(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), fresh),
        "mismatch/engine_max": max_pair(log_ratio.abs(), fresh),
    }


def importance_weight(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio clamped to +-20 nats, without gradient; any shape."""
    return log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _importance_ratio(log_ratio: Tensor, trained: Tensor, layout: Layout, level: str | None) -> Tensor:
    if level == "sequence":
        return layout.spread(importance_weight(layout.sums(log_ratio, trained)), trained)
    return masked(importance_weight(log_ratio), trained)


def _bound(ratio: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, Tensor]:
    """The weights after truncation or band, and where `ratio` was within the bound, both [B, T]."""
    lower, upper = config.weight_bounds()
    if lower is None:
        return ratio.clamp(max=upper), ratio <= upper
    within = (ratio >= lower) & (ratio <= upper)
    return masked(ratio, within), within


def _normalise(weights: Tensor, trained: Tensor, layout: Layout, config: RolloutCorrectionConfig) -> Tensor:
    """Divides by the mean over tokens or sequences if the config says so; weights that are all 0 stay 0."""
    if not config.rollout_is_batch_normalize:
        return weights
    if config.rollout_is == "sequence":
        counts = layout.counts(trained).to(weights.dtype)
        mean = (layout.sums(weights, trained) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    else:
        mean = weights.sum() / trained.sum().clamp(min=1)
    return weights / torch.where(mean > 0, mean, torch.ones_like(mean))


def _accepted(log_ratio: Tensor, trained: Tensor, layout: Layout, config: RolloutCorrectionConfig) -> Tensor:
    """[B, T] bool: every statistic of `rollout_rs` is within its bounds (a NaN is not)."""
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    accepted = torch.ones_like(trained)
    for name, lower, upper in config.rejection_bounds():
        statistic = _statistic(name, clamped, trained, layout)
        accepted = accepted & (statistic >= lower) & (statistic <= upper)
    return accepted


def _below_second_moment(log_ratio: Tensor, trained: Tensor, threshold: float) -> Tensor:
    """[B, T] bool: without the tokens of largest l^2, as few as leave the others a mean l^2 below `threshold`.

    One token always stays. Source: M2PO, arXiv:2510.01161.
    """
    squares = torch.where(trained, log_ratio.square(), torch.inf).flatten()
    ascending, order = squares.sort()
    count = trained.sum()
    numbers = torch.arange(1, len(squares) + 1, device=squares.device)
    within = (ascending.cumsum(0) / numbers < threshold) & (numbers <= count)
    # The means of the smallest ascend with their number, so that the largest set within is a prefix.
    chosen = numbers <= within.sum().clamp(min=1)
    return torch.zeros_like(trained).flatten().scatter(0, order, chosen).view(trained.shape)


def _statistic(name: RejectionStatistic, log_ratio: Tensor, trained: Tensor, layout: Layout) -> Tensor:
    """[B, T] the statistic of each trained token, or of the sequence it belongs to, in nats."""
    scope, _, kind = name.rpartition("_")
    per_token = _PER_TOKEN[kind](log_ratio)
    if scope == "token":
        return per_token
    if scope == "seq_max":
        return layout.spread(layout.maxima(per_token, trained), trained)
    sums = layout.sums(per_token, trained)
    if scope == "seq_mean":
        sums = sums / layout.counts(trained).to(sums.dtype).clamp(min=1)
    return layout.spread(sums, trained)


def _k3(log_ratio: Tensor) -> Tensor:
    """e^l - 1 - l, without the cancellation near l = 0 (Schulman, "Approximating KL Divergence", 2020)."""
    return torch.expm1(log_ratio) - log_ratio


_PER_TOKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": _k3,
}


def _mismatch(log_ratio: Tensor, trained: Tensor, layout: Layout) -> Metrics:
    """How far apart the two policies are, before any correction."""
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    counts = layout.counts(trained).to(log_ratio.dtype)
    sums, present = layout.sums(log_ratio, trained), counts > 0
    return {
        "mismatch/kl": mean_pair(-log_ratio, trained),
        "mismatch/k3": mean_pair(_k3(clamped), trained),
        "mismatch/max": max_pair(log_ratio.abs(), trained),
        "mismatch/chi2_token": mean_pair(clamped.exp().square() - 1, trained),
        "mismatch/chi2_seq": mean_pair(importance_weight(sums).square() - 1, present),
        "mismatch/ppl_ratio": mean_pair(importance_weight(-sums / counts.clamp(min=1)), present),
    }


def _weight_metrics(weights: Tensor, trained: Tensor) -> Metrics:
    weight, squared = mean_pair(weights, trained), mean_pair(weights.square(), trained)
    return {
        "mismatch/weight": weight,
        "mismatch/weight_squared": squared,
        "mismatch/ess": effective_sample_size(weight, squared),
    }


def _rejection_metrics(kept: Tensor, trained: Tensor, layout: Layout) -> Metrics:
    before, after = layout.counts(trained), layout.counts(kept)
    return {
        "mismatch/rejected_fraction": mean_pair((~kept).float(), trained),
        "mismatch/rejected_sequence_fraction": mean_pair((after < before).float(), before > 0),
    }
