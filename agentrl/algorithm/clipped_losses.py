"""Losses around a ratio of probabilities, clipped, truncated or smoothed so that one update does not go too far."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.correction import LOG_RATIO_LIMIT
from agentrl.algorithm.losses import LOSSES, LossInputs
from agentrl.algorithm.masking import masked
from agentrl.algorithm.metrics import Metrics, mean_pair

_SEQUENCE_LOG_RATIO_LIMIT = 10.0
_DPPO_EPSILON = 1e-8


@LOSSES.register("vanilla")
def _vanilla(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    return _clipped(inputs, inputs.prox_logp, inputs.weights(inputs.prox_logp))


@LOSSES.register("bypass_mode")
def _bypass_mode(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    if inputs.config.loss_type == "ppo_clip":
        return _clipped(inputs, inputs.behav_logp, None)
    weights = inputs.weights(inputs.logp)
    loss = -inputs.advantages * inputs.logp
    metrics = ratio_metrics(inputs, log_ratio(inputs.logp, inputs.behav_logp), weights)
    return loss if weights is None else weights * loss, metrics


@LOSSES.register("gspo")
def _gspo(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The ratio of a sequence: the geometric mean over its tokens, clipped as one. arXiv:2507.18071."""
    config, layout = inputs.config, inputs.layout
    plain = inputs.logp - inputs.prox_logp
    counts = layout.counts(inputs.kept).to(plain.dtype).clamp(min=1)
    mean = layout.spread(layout.sums(plain.detach(), inputs.kept) / counts, inputs.kept)
    # The value is the sequence's, the gradient that of each of its tokens.
    ratio = (inputs.logp - inputs.logp.detach() + mean).clamp(max=_SEQUENCE_LOG_RATIO_LIMIT).exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    weights = inputs.weights(inputs.prox_logp)
    metrics = ratio_metrics(inputs, plain, weights, clipped > unclipped)
    loss = torch.maximum(unclipped, clipped)
    return loss if weights is None else weights * loss, metrics


@LOSSES.register("geo_mean")
def _geo_mean(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """GMPO: the geometric mean over a sequence of token ratios, each clipped on its own. arXiv:2507.20673.

    The clip ratios are bounds on the logarithm. Advantages and weights enter by their (geometric) mean over a
    sequence; all its tokens get the same value.
    """
    config, layout, kept = inputs.config, inputs.layout, inputs.kept
    plain = inputs.logp - inputs.prox_logp
    sign = inputs.advantages.sign()
    within = plain.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    smaller = sign * torch.minimum(sign * plain, sign * within)
    counts = layout.counts(kept).to(plain.dtype) + 1e-8
    ratio = (layout.sums(smaller, kept) / counts).clamp(max=LOG_RATIO_LIMIT).exp()
    loss = -layout.sums(inputs.advantages, kept) / counts * ratio
    weights = inputs.weights(inputs.prox_logp)
    if weights is not None:
        logs = masked((weights + 1e-10).log(), kept)
        loss = loss * (layout.sums(logs, kept) / counts).exp()
    return layout.spread(loss, kept), ratio_metrics(inputs, plain, weights, plain != within)


@LOSSES.register("cispo")
def _cispo(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted with the clipped ratio: no token loses its gradient. arXiv:2506.13585."""
    config = inputs.config
    plain = log_ratio(inputs.logp, inputs.prox_logp)
    ratio = plain.detach().exp()
    within = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = -within * inputs.advantages * inputs.logp
    weights = inputs.weights(inputs.prox_logp)
    metrics = ratio_metrics(inputs, plain, weights, ratio != within)
    return loss if weights is None else weights * loss, metrics


@LOSSES.register("sapo")
def _sapo(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The ratio through a sigmoid instead of a clip. arXiv:2511.20347."""
    config = inputs.config
    plain = log_ratio(inputs.logp, inputs.prox_logp)
    positive = (inputs.advantages > 0).to(plain.dtype)
    tau = config.tau_neg + (config.tau_pos - config.tau_neg) * positive
    gate = torch.sigmoid(tau * (plain.exp() - 1)) * (4 / tau)
    weights = inputs.weights(inputs.prox_logp)
    loss = -gate * inputs.advantages
    return loss if weights is None else weights * loss, ratio_metrics(inputs, plain, weights)


@LOSSES.register("dppo_tv")
def _dppo_tv(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Tokens whose probability has moved too far, in the direction of the update, are left out. arXiv:2602.04879."""
    config = inputs.config
    moved = inputs.logp.detach().exp() - inputs.prox_logp.exp()
    near = torch.where(inputs.advantages > 0, moved <= config.clip_ratio_high, moved >= -config.clip_ratio_low)
    return _trust_region(inputs, near)


@LOSSES.register("dppo_kl")
def _dppo_kl(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The same, by the divergence of drawing the token or not. arXiv:2602.04879."""
    config = inputs.config
    logp, anchor = inputs.logp.detach(), inputs.prox_logp
    now, before = logp.exp(), anchor.exp()
    rest = ((1 - before + _DPPO_EPSILON) / (1 - now + _DPPO_EPSILON)).log()
    divergence = before * (anchor - logp) + (1 - before) * rest
    near = torch.where(
        inputs.advantages > 0,
        (divergence <= config.clip_ratio_high) | (now <= before),
        (divergence <= config.clip_ratio_low) | (now >= before),
    )
    return _trust_region(inputs, near)


def _trust_region(inputs: LossInputs, near: Tensor) -> tuple[Tensor, Metrics]:
    """REINFORCE with the truncated ratio, on the tokens that are `near` their anchor."""
    plain = log_ratio(inputs.logp, inputs.prox_logp)
    ratio = plain.detach().exp()
    loss = masked(-inputs.advantages * ratio.clamp(max=inputs.config.clip_ratio_c) * inputs.logp, near)
    weights = inputs.weights(inputs.prox_logp)
    truncated = near & (ratio > inputs.config.clip_ratio_c)
    metrics = ratio_metrics(inputs, plain, weights, ~near, truncated)
    return loss if weights is None else weights * loss, metrics


def _clipped(inputs: LossInputs, anchor_logp: Tensor, weights: Tensor | None) -> tuple[Tensor, Metrics]:
    """The clipped surrogate around `anchor_logp`, with dual clip, times `weights` [B, T]."""
    config, advantages = inputs.config, inputs.advantages
    plain = log_ratio(inputs.logp, anchor_logp)
    ratio = plain.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss, bound = torch.maximum(unclipped, clipped), -advantages * config.clip_ratio_c
    at_bound = (advantages < 0) & (loss > bound)
    metrics = ratio_metrics(inputs, plain, weights, clipped > unclipped, at_bound)
    loss = torch.where(at_bound, bound, loss)
    return loss if weights is None else weights * loss, metrics


def log_ratio(logp: Tensor, anchor_logp: Tensor) -> Tensor:
    """logp - anchor_logp, clamped to +-20 nats: beyond it the gradient is 0."""
    return (logp - anchor_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_metrics(
    inputs: LossInputs,
    plain: Tensor,
    weights: Tensor | None,
    clipped: Tensor | None = None,
    at_bound: Tensor | None = None,
) -> Metrics:
    """What `policy_loss` reports, from the log ratio [B, T]; where nothing is clipped, None."""
    kept, plain = inputs.kept, plain.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    never = torch.zeros_like(kept)
    return {
        "actor/ratio_mean": mean_pair(plain.exp(), kept),
        "actor/clip_fraction": mean_pair((never if clipped is None else clipped).float(), kept),
        "actor/clip_fraction_c": mean_pair((never if at_bound is None else at_bound).float(), kept),
        "actor/ppo_kl": mean_pair(-plain, kept),
        "actor/behav_weight_mean": mean_pair(torch.ones_like(plain) if weights is None else weights, kept),
    }
