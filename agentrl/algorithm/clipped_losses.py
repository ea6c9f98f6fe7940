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
    return _dual_clipped(inputs, inputs.prox_logp)


@LOSSES.register("bypass_mode")
def _bypass_mode(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    if inputs.config.loss_type == "ppo_clip":
        return _dual_clipped(inputs, inputs.behav_logp)
    return -inputs.advantages * inputs.logp, ratio_metrics(inputs, inputs.logp - inputs.behav_logp)


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
    return torch.maximum(unclipped, clipped), ratio_metrics(inputs, plain, clipped > unclipped)


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
    if inputs.weights is not None:
        logs = masked((inputs.weights + 1e-10).log(), kept)
        loss = loss * (layout.sums(logs, kept) / counts).exp()
    return layout.spread(loss, kept), ratio_metrics(inputs, plain, plain != within)


@LOSSES.register("cispo")
def _cispo(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted with the clipped ratio: no token loses its gradient. arXiv:2506.13585."""
    config = inputs.config
    plain = log_ratio(inputs.logp, inputs.prox_logp)
    ratio = plain.detach().exp()
    within = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -within * inputs.advantages * inputs.logp, ratio_metrics(inputs, plain, ratio != within)


@LOSSES.register("sapo")
def _sapo(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The ratio through a sigmoid instead of a clip. arXiv:2511.20347."""
    config = inputs.config
    plain = log_ratio(inputs.logp, inputs.prox_logp)
    positive = (inputs.advantages > 0).to(plain.dtype)
    tau = config.tau_neg + (config.tau_pos - config.tau_neg) * positive
    gate = torch.sigmoid(tau * (plain.exp() - 1)) * (4 / tau)
    return -gate * inputs.advantages, ratio_metrics(inputs, plain)


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
    truncated = near & (ratio > inputs.config.clip_ratio_c)
    return loss, ratio_metrics(inputs, plain, ~near, truncated)


def _dual_clipped(inputs: LossInputs, anchor_logp: Tensor) -> tuple[Tensor, Metrics]:
    plain, loss, clipped = surrogate(inputs, anchor_logp)
    bound = -inputs.advantages * inputs.config.clip_ratio_c
    at_bound = (inputs.advantages < 0) & (loss > bound)
    return torch.where(at_bound, bound, loss), ratio_metrics(inputs, plain, clipped, at_bound)


def surrogate(inputs: LossInputs, anchor_logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log ratio to `anchor_logp`, the surrogate loss that is clipped around it, and where the clip acts."""
    config, advantages = inputs.config, inputs.advantages
    plain = log_ratio(inputs.logp, anchor_logp)
    ratio = plain.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return plain, torch.maximum(unclipped, clipped), clipped > unclipped


def log_ratio(logp: Tensor, anchor_logp: Tensor) -> Tensor:
    """logp - anchor_logp, clamped to +-20 nats: beyond it the gradient is 0."""
    return (logp - anchor_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_metrics(
    inputs: LossInputs,
    plain: Tensor,
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
    }
