"""Advantage estimators, computed once over the global batch, before it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.group import GroupScores, group_scores
from agentrl.algorithm.layout import Layout, TrainedTokens
from agentrl.algorithm.masking import is_trained, masked, require_same_shape
from agentrl.algorithm.registry import Registry

_STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageConfig:
    """The constants of the estimators.

    Attributes:
        norm_adv_by_std_in_grpo: divide by the group's standard deviation (GRPO); False is Dr.GRPO.
        gamma: discount per trained token, in [0, 1]; read by `reinforce_plus_plus`.
    """

    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}: a discount lies in [0, 1]")


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What an estimator may use; see `compute_advantages`."""

    token_rewards: Tensor
    mask: Tensor
    layout: Layout
    config: AdvantageConfig
    values: Tensor | None
    logp: Tensor | None
    ref_logp: Tensor | None
    baselines: Tensor | None
    reward_parts: dict[str, Tensor] | None
    sum_pi_squared: Tensor | None

    def groups(self) -> GroupScores:
        return group_scores(self.token_rewards, self.mask, self.layout)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] to [B, T] at trained positions, 0 elsewhere."""
        return self.layout.spread(per_sequence, self.mask)


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]

ESTIMATORS: Registry[Estimator] = Registry("adv_estimator", entry_points="agentrl.advantages")
"""Functions from `AdvantageInputs` to (advantages, returns), [B, T] in any float dtype."""


@torch.no_grad()
def compute_advantages(
    estimator: str,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    layout: Layout,
    config: AdvantageConfig,
    values: Tensor | None = None,
    logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    baselines: Tensor | None = None,
    reward_parts: dict[str, Tensor] | None = None,
    sum_pi_squared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the trained tokens of a global batch.

    | estimator | advantage of a token |
    |---|---|
    | `grpo` | (score - group mean) / (group std + 1e-6), arXiv:2402.03300; without std: arXiv:2503.20783 |
    | `rloo` | score - mean of the other members, arXiv:2402.14740 |
    | `reinforce_plus_plus` | discounted return-to-go, whitened over all tokens, arXiv:2501.03262 |
    | `reinforce_plus_plus_baseline` | score - group mean, whitened over all tokens, arXiv:2501.03262 |

    An episode's score is the mean over its sequences (branches) of the sum of their token rewards, each branch
    carrying the episode's outcome; group statistics count an episode once. A failed member is simply not in
    the batch. A member without a partner has no baseline: its advantage is 0 under grpo, rloo and
    reinforce_plus_plus_baseline. Equal scores give exactly 0. Statistics are computed in fp64; call it where
    the device has that, else on CPU tensors.

    Args:
        token_rewards: [B, T] floats; read at trained positions only, so the outcome belongs on a sequence's
            last trained token.
        mask: [B, T], 1 on trained tokens, as it was before rejection or staleness masked any: what those take
            out stays in the statistics.
        layout: the episode and group of each sequence.
        values, logp, ref_logp, sum_pi_squared: [B, T], for estimators that need them.
        baselines: [S] rewards of greedy rollouts, for estimators that need them.
        reward_parts: named [B, T] rewards, for estimators that need them.

    Returns:
        (advantages, returns), [B, T] in the dtype of `token_rewards`, 0 at masked positions. Estimators without
        a notion of return give the advantages twice.

    Raises:
        ValueError: unknown estimator, shapes that differ, rewards that are not floats, or an episode whose
            sequences lie in different groups.
    """
    require_same_shape(
        token_rewards=token_rewards,
        mask=mask,
        sequence=layout.sequence,
        values=values,
        logp=logp,
        ref_logp=ref_logp,
        sum_pi_squared=sum_pi_squared,
    )
    if not token_rewards.is_floating_point():
        raise ValueError(f"token_rewards has dtype {token_rewards.dtype}: pass floats")
    function = ESTIMATORS.get(estimator)
    advantages, returns = function(
        AdvantageInputs(
            token_rewards=token_rewards,
            mask=mask,
            layout=layout,
            config=config,
            values=values,
            logp=logp,
            ref_logp=ref_logp,
            baselines=baselines,
            reward_parts=reward_parts,
            sum_pi_squared=sum_pi_squared,
        )
    )
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


@ESTIMATORS.register("grpo")
def _grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    group = inputs.groups()
    advantage = group.score - group.mean
    if inputs.config.norm_adv_by_std_in_grpo:
        advantage = advantage / (group.std + _STD_EPSILON)
    advantages = inputs.spread(masked(advantage, group.has_baseline))
    return advantages, advantages


@ESTIMATORS.register("rloo")
def _rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """score - (n mean - score) / (n - 1), which is n / (n - 1) * (score - mean)."""
    group = inputs.groups()
    advantage = (group.score - group.mean) * group.size / (group.size - 1).clamp(min=1)
    advantages = inputs.spread(masked(advantage, group.has_baseline))
    return advantages, advantages


@ESTIMATORS.register("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    tokens = TrainedTokens.of(inputs.layout, inputs.mask)
    returns = tokens.restore(discounted_returns(tokens.align(inputs.token_rewards.double()), inputs.config.gamma))
    return whiten(returns, is_trained(inputs.mask)), returns


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    group = inputs.groups()
    counted = is_trained(inputs.mask) & inputs.spread(group.has_baseline)
    advantages = whiten(inputs.spread(group.score - group.mean), counted)
    return advantages, advantages


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """[S, L] return-to-go of each step: r_t + gamma r_(t+1) + ..., the sequences left-aligned."""
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for step in reversed(range(rewards.shape[1])):
        running = rewards[:, step] + gamma * running
        returns[:, step] = running
    return returns


def whiten(values: Tensor, keep: Tensor) -> Tensor:
    """`values` [B, T] shifted and scaled to mean 0 and variance 1 over `keep` (bool), 0 elsewhere.

    Variance with Bessel's correction plus 1e-8. Equal values, or one alone, give exactly 0.
    """
    kept = values[keep]
    if not len(kept):
        return torch.zeros_like(values)
    centred = kept - kept.min()
    centred = centred - centred.mean()
    variance = centred.square().sum() / max(len(kept) - 1, 1)
    return torch.zeros_like(values).masked_scatter(keep, centred / (variance + _VARIANCE_EPSILON).sqrt())
