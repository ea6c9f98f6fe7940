"""Policy losses: what each trained token contributes to the gradient.

A loss function returns one value per token; rejection and aggregation happen in one place, `policy_loss`, so
that no loss can differ in its denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithm.aggregate import AGGREGATIONS, Totals, aggregate
from agentrl.algorithm.correction import LOG_RATIO_LIMIT, Correction, importance_weight
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.masking import is_trained, masked, require_same_shape
from agentrl.algorithm.metrics import Metrics, mean_pair
from agentrl.algorithm.registry import Registry


@dataclass(frozen=True)
class LossConfig:
    """The constants of the policy losses.

    Attributes:
        clip_ratio_low: the ratio r is clipped below at 1 - this.
        clip_ratio_high: the ratio r is clipped above at 1 + this.
        clip_ratio_c: dual clip: with A < 0 a token's loss is at most -A times this; above 1.
        loss_agg_mode: a mode of `aggregate`.
        loss_scale_factor: tokens by which `seq-mean-token-sum-norm` divides; None uses the row width.
        loss_type: the loss under `bypass_mode`.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"

    def __post_init__(self) -> None:
        AGGREGATIONS.get(self.loss_agg_mode)
        if not 0 <= self.clip_ratio_low <= 1:
            raise ValueError(f"clip_ratio_low is {self.clip_ratio_low}: 1 - clip_ratio_low must lie in [0, 1]")
        if self.clip_ratio_high < 0:
            raise ValueError(f"clip_ratio_high is {self.clip_ratio_high}: pass 0 or more")
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c is {self.clip_ratio_c}: pass a value above 1, e.g. 3.0")
        if self.loss_scale_factor is not None and self.loss_scale_factor <= 0:
            raise ValueError(f"loss_scale_factor is {self.loss_scale_factor}: pass a positive number of tokens")
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_factor has no effect with loss_agg_mode {self.loss_agg_mode}: "
                "leave it out or use seq-mean-token-sum-norm"
            )
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"loss_type is {self.loss_type!r}: use ppo_clip or reinforce")


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss function works on, all [B, T] and 0 outside `kept`; only `logp` carries a gradient.

    Attributes:
        kept: bool, the trained tokens that rejection left.
    """

    logp: Tensor
    prox_logp: Tensor
    behav_logp: Tensor
    advantages: Tensor
    kept: Tensor
    layout: Layout
    config: LossConfig
    correction: Correction | None

    def weights(self, numerator_logp: Tensor) -> Tensor | None:
        """The importance weights of `correction`, or, without one, numerator / behaviour, untruncated."""
        if self.correction is None:
            return importance_weight(numerator_logp - self.behav_logp)
        weights = self.correction.weights
        return None if weights is None else masked(weights.detach(), self.kept)


LOSSES: Registry[Callable[[LossInputs], tuple[Tensor, Metrics]]] = Registry("loss_mode", entry_points="agentrl.losses")
"""Functions from `LossInputs` to per-token losses [B, T] and metrics over the kept tokens."""


def policy_loss(
    loss_mode: str,
    *,
    logp: Tensor,
    prox_logp: Tensor,
    behav_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    layout: Layout | None = None,
    correction: Correction | None = None,
    totals: Totals | None = None,
) -> tuple[Tensor, Metrics]:
    """This call's share of the policy loss of an optimiser step, and its metrics.

    | loss_mode | loss of a token |
    |---|---|
    | `vanilla` | decoupled PPO: w max(-A r, -A clip(r)), dual clip for A < 0, r = exp(logp - prox_logp) |
    | `bypass_mode`, `ppo_clip` | the same with behav_logp for prox_logp and no weight: r holds it |
    | `bypass_mode`, `reinforce` | -w A logp |

    w comes from `correction`: none where its weights are None. Without a correction w is the full ratio,
    exp(prox_logp - behav_logp), under `reinforce` exp(logp - behav_logp). It never carries a gradient.
    Rejected tokens (`correction.mask`) leave the sum but not the denominators.

    Args:
        logp: [B, T] log-probs (nats) of the current policy, with gradient.
        prox_logp: [B, T] log-probs of the proximal policy; not read by `bypass_mode`.
        behav_logp: [B, T] log-probs recorded when the tokens were sampled.
        advantages: [B, T].
        mask: [B, T], 1 on trained tokens. Nothing at the other positions is read, NaN and inf included.
        layout: the sequences of packed rows; None means that row i is sequence i.
        totals: counts of the whole optimiser step; None uses those of this call.

    Returns:
        The loss, a scalar to be added over calls, and pairs over the kept tokens: `actor/ratio_mean` (r),
        `actor/clip_fraction` (tokens whose clipped term is the larger), `actor/clip_fraction_c` (tokens at
        the dual clip), `actor/ppo_kl` (mean of -log r), `actor/behav_weight_mean` (w, 1 for no weight).

    Raises:
        ValueError: unknown loss mode, or shapes that differ.

    Source: Schulman et al., arXiv:1707.06347; decoupled: arXiv:2110.00641; dual clip: Ye et al.,
    arXiv:1912.09729.
    """
    require_same_shape(
        logp=logp,
        prox_logp=prox_logp,
        behav_logp=behav_logp,
        advantages=advantages,
        mask=mask,
        sequence=layout.sequence if layout else None,
        correction_mask=correction.mask if correction else None,
        correction_weights=correction.weights if correction else None,
    )
    kept = is_trained(mask)
    if correction is not None:
        kept = kept & is_trained(correction.mask)
    layout = layout or Layout.rows(mask)
    inputs = LossInputs(
        logp=masked(logp, kept),
        prox_logp=masked(prox_logp.detach(), kept),
        behav_logp=masked(behav_logp.detach(), kept),
        advantages=masked(advantages.detach(), kept),
        kept=kept,
        layout=layout,
        config=config,
        correction=correction,
    )
    values, metrics = LOSSES.get(loss_mode)(inputs)
    loss = aggregate(
        masked(values, kept),
        mask,
        config.loss_agg_mode,
        layout=layout,
        totals=totals,
        scale=config.loss_scale_factor,
    )
    return loss, metrics


@LOSSES.register("vanilla")
def _vanilla(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    return _clipped(inputs, inputs.prox_logp, inputs.weights(inputs.prox_logp))


@LOSSES.register("bypass_mode")
def _bypass_mode(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    if inputs.config.loss_type == "ppo_clip":
        return _clipped(inputs, inputs.behav_logp, None)
    return _reinforce(inputs, inputs.weights(inputs.logp))


def _clipped(inputs: LossInputs, anchor_logp: Tensor, weights: Tensor | None) -> tuple[Tensor, Metrics]:
    """The clipped surrogate around `anchor_logp`, with dual clip, times `weights` [B, T]."""
    config, advantages = inputs.config, inputs.advantages
    ratio = _ratio(inputs.logp, anchor_logp)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss, bound = torch.maximum(plain, clipped), -advantages * config.clip_ratio_c
    at_bound = (advantages < 0) & (loss > bound)
    metrics = _metrics(inputs, ratio, weights, clipped > plain, at_bound)
    loss = torch.where(at_bound, bound, loss)
    return loss if weights is None else weights * loss, metrics


def _reinforce(inputs: LossInputs, weights: Tensor | None) -> tuple[Tensor, Metrics]:
    loss = -inputs.advantages * inputs.logp
    never = torch.zeros_like(inputs.kept)
    metrics = _metrics(inputs, _ratio(inputs.logp, inputs.behav_logp), weights, never, never)
    return loss if weights is None else weights * loss, metrics


def _ratio(logp: Tensor, anchor_logp: Tensor) -> Tensor:
    """exp(logp - anchor_logp), the exponent clamped to +-20: beyond it the gradient is 0."""
    return (logp - anchor_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _metrics(inputs: LossInputs, ratio: Tensor, weights: Tensor | None, clipped: Tensor, at_bound: Tensor) -> Metrics:
    applied = torch.ones_like(ratio) if weights is None else weights
    return {
        "actor/ratio_mean": mean_pair(ratio, inputs.kept),
        "actor/clip_fraction": mean_pair(clipped.float(), inputs.kept),
        "actor/clip_fraction_c": mean_pair(at_bound.float(), inputs.kept),
        "actor/ppo_kl": mean_pair(-ratio.log(), inputs.kept),
        "actor/behav_weight_mean": mean_pair(applied, inputs.kept),
    }
