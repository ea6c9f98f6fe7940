"""Policy losses: what each trained token contributes to the gradient.

A loss function returns one value per token; weights, rejection and aggregation happen in one place, `policy_loss`, so
that no loss can forget the correction or differ in its denominators.
"""

from __future__ import annotations

import torch
from torch import Tensor

# These register the losses.
from agentrl.algorithm import clipped_losses, plain_losses  # noqa: F401
from agentrl.algorithm.aggregate import Totals, aggregate
from agentrl.algorithm.correction import Correction, importance_weight
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.losses import LOSSES, LossConfig, LossInputs
from agentrl.algorithm.masking import is_trained, masked, require_same_shape, widened
from agentrl.algorithm.metrics import Metrics, is_pair, mean_pair
from agentrl.algorithm.registry import describe
from agentrl.config.names import SEQUENCE_MEANS

WEIGHS_SEQUENCES = "geo_mean"
"""The loss that takes the weights into a mean over a sequence, instead of being multiplied by them."""

__all__ = ["LOSSES", "LossConfig", "LossInputs", "policy_loss"]


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

    | loss_mode | loss of a token, r = exp(logp - prox_logp) |
    |---|---|
    | `vanilla` | decoupled PPO: w max(-A r, -A clip(r)), dual clip for A < 0, arXiv:1707.06347, arXiv:1912.09729 |
    | `bypass_mode`, `ppo_clip` | the same with behav_logp for prox_logp and no weight: r holds it |
    | `bypass_mode`, `reinforce` | -w A logp |
    | `gspo` | w max(-A s, -A clip(s)), s the geometric mean of r over the sequence, arXiv:2507.18071 |
    | `geo_mean` | -A g, g the geometric mean over the sequence of r clipped in the logarithm, arXiv:2507.20673 |
    | `cispo` | -w clip(r) A logp, no gradient through r, arXiv:2506.13585 |
    | `sapo` | -w A sigmoid(tau (r - 1)) 4 / tau, arXiv:2511.20347 |
    | `dppo_tv`, `dppo_kl` | -w min(r, c) A logp; 0 where the token moved beyond the clip ratios, arXiv:2602.04879 |
    | `gpg` | -w A logp, arXiv:2504.02546 |
    | `clip_cov` | `vanilla` without dual clip; 0 for random tokens of high covariance of A and logp, arXiv:2505.22617 |
    | `kl_cov` | w (-A r + coef abs(log r)) for the tokens of highest covariance, else -w A r, arXiv:2505.22617 |
    | `dro` | -w (A logp - beta / 2 (log r)^2), arXiv:2405.19107 |

    w comes from `correction`: none where its weights are None. Without a correction w is the full ratio,
    exp(prox_logp - behav_logp), under `reinforce` exp(logp - behav_logp). It never carries a gradient.
    Rejected tokens (`correction.mask`) leave the sum but not the denominators. Log ratios are clamped to +-20 nats
    before `exp`. `clip_cov` and `kl_cov` choose among the tokens of the call, so that they alone depend on how a
    step is cut into calls.

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
        ValueError: unknown loss mode, shapes that differ, `gspo` or `sapo` with another aggregation than
            seq-mean-token-mean, `dro` without `dro_beta`, or a loss of the user's that does not return per-token
            losses with a gradient and metrics.

    Source: decoupled PPO: arXiv:2110.00641; of the others see the table.
    """
    _check(loss_mode, config)
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
    logp, prox_logp, behav_logp, advantages = (
        masked(widened(values), kept) for values in (logp, prox_logp.detach(), behav_logp.detach(), advantages.detach())
    )
    reinforce = loss_mode == "bypass_mode" and config.loss_type == "reinforce"
    if loss_mode == "bypass_mode" and not reinforce:
        weights = None
    elif correction is None:
        weights = masked(importance_weight((logp if reinforce else prox_logp) - behav_logp), kept)
    else:
        weights = None if correction.weights is None else masked(correction.weights.detach(), kept)
    inputs = LossInputs(logp, prox_logp, behav_logp, advantages, kept, layout, config, weights)
    values, metrics = _evaluated(loss_mode, inputs)
    if weights is not None and loss_mode != WEIGHS_SEQUENCES:
        values = weights * values
    applied = torch.ones_like(logp) if weights is None else weights
    loss = aggregate(
        masked(values, kept),
        mask,
        config.loss_agg_mode,
        layout=layout,
        totals=totals,
        scale=config.loss_scale_factor,
    )
    return loss, {**metrics, "actor/behav_weight_mean": mean_pair(applied, kept)}


def _evaluated(loss_mode: str, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The losses of tokens and the metrics that a loss function returns, if that is what it returns."""
    result: object = LOSSES.get(loss_mode)(inputs)
    shape = inputs.logp.shape
    match result:
        case (Tensor() as values, dict() as metrics) if values.shape == shape:
            pass
        case _:
            raise ValueError(
                f"actor.loss_mode {loss_mode} returned {describe(result)}: return (losses, metrics), one loss for each "
                f"token, {list(shape)}, and a dict, which may be empty"
            )
    if inputs.logp.requires_grad and not values.requires_grad:
        raise ValueError(
            f"actor.loss_mode {loss_mode} returned losses without a gradient: compute them from inputs.logp, without "
            "detach or no_grad"
        )
    for name, pair in metrics.items():
        if not isinstance(name, str) or not is_pair(pair):
            raise ValueError(
                f"actor.loss_mode {loss_mode} returned {describe(pair)} as metric {name!r}: return a pair of scalar "
                "tensors, (sum, count), such as agentrl.algorithm.mean_pair(values, inputs.kept)"
            )
    return values, metrics


def _check(loss_mode: str, config: LossConfig) -> None:
    if loss_mode in SEQUENCE_MEANS and config.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"loss_mode {loss_mode} is a mean over sequences: set loss_agg_mode to seq-mean-token-mean, "
            f"not {config.loss_agg_mode}"
        )
    if loss_mode == "dro" and config.dro_beta is None:
        raise ValueError("loss_mode dro needs dro_beta: pass a positive number")
