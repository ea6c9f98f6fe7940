"""Losses without a clipped ratio for every token: plain policy gradients, and those that hold some tokens back."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.clipped_losses import log_ratio, ratio_metrics, surrogate
from agentrl.algorithm.losses import LOSSES, LossInputs
from agentrl.algorithm.masking import masked
from agentrl.algorithm.metrics import Metrics


@LOSSES.register("gpg")
def _gpg(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE. arXiv:2504.02546."""
    return -inputs.advantages * inputs.logp, ratio_metrics(inputs, inputs.logp - inputs.prox_logp)


@LOSSES.register("dro")
def _dro(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE with a quadratic pull of the log ratio towards 0. arXiv:2405.19107."""
    assert inputs.config.dro_beta is not None
    plain = inputs.logp - inputs.prox_logp
    loss = -(inputs.logp * inputs.advantages - inputs.config.dro_beta / 2 * plain.square())
    return loss, ratio_metrics(inputs, plain)


@LOSSES.register("clip_cov")
def _clip_cov(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The clipped surrogate, without some random tokens of high covariance. arXiv:2505.22617.

    Chosen among the tokens of this call with torch's generator. Synchronises with the host.
    """
    config, kept = inputs.config, inputs.kept
    plain, loss, clipped = surrogate(inputs, inputs.prox_logp)
    covariance = _covariance(inputs)
    high = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = (high & kept & ~clipped).flatten().nonzero().squeeze(1)
    count = max(int(config.clip_cov_ratio * int(kept.sum())), 1)
    order = torch.randperm(len(candidates)).to(candidates.device)
    held = torch.zeros_like(kept).flatten().index_fill(0, candidates[order[:count]], True).view(kept.shape)
    return masked(loss, ~held), ratio_metrics(inputs, plain, held)


@LOSSES.register("kl_cov")
def _kl_cov(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The unclipped surrogate, with a penalty on the log ratio of the tokens of highest covariance. arXiv:2505.22617.

    Chosen among the tokens of this call. Synchronises with the host.
    """
    config, kept = inputs.config, inputs.kept
    plain, ratio = inputs.logp - inputs.prox_logp, log_ratio(inputs.logp, inputs.prox_logp).exp()
    tokens = kept.flatten().nonzero().squeeze(1)
    count = min(len(tokens), max(1, int(len(tokens) * config.kl_cov_ratio)))
    highest = _covariance(inputs).flatten()[tokens].topk(count).indices
    held = torch.zeros_like(kept).flatten().index_fill(0, tokens[highest], True).view(kept.shape)
    loss = -inputs.advantages * ratio + config.ppo_kl_coef * masked(plain.abs(), held)
    return loss, ratio_metrics(inputs, plain, held)


def _covariance(inputs: LossInputs) -> Tensor:
    """[B, T] each token's part of the covariance of advantage and log-prob over the kept tokens."""
    count = inputs.kept.sum().clamp(min=1)
    logp = inputs.logp.detach()
    advantages = inputs.advantages - inputs.advantages.sum() / count
    return advantages * (logp - logp.sum() / count)
