"""Estimators that compare the outcomes of a group's episodes. All tokens of an episode get the same advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.estimators import ESTIMATORS, AdvantageInputs
from agentrl.algorithm.group import GroupScores, group_scores
from agentrl.algorithm.masking import is_trained, masked
from agentrl.algorithm.statistics import whiten

_STD_EPSILON = 1e-6


@ESTIMATORS.register("grpo")
def _grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return _spread(inputs, _normalised(inputs, inputs.groups()))


@ESTIMATORS.register("grpo_passk")
def _grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Only the best episode of a group, by how much it is better than the second best."""
    group = inputs.groups()
    second, is_best = group.runner_up()
    advantage = masked(group.score - second, is_best & group.has_baseline)
    if inputs.config.norm_adv_by_std_in_grpo:
        advantage = advantage / (group.std + _STD_EPSILON)
    return _spread(inputs, advantage)


@ESTIMATORS.register("gdpo")
def _gdpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Each part of the reward normalised within its group, their weighted sum whitened over the batch."""
    parts, config = inputs.required("reward_parts"), inputs.config
    names = config.gdpo_reward_keys or tuple(sorted(parts))
    missing = [name for name in names if name not in parts]
    if missing or not names:
        known = ", ".join(sorted(parts)) or "none"
        raise ValueError(f"no reward part {', '.join(missing) or 'at all'}: the episodes' rewards have {known}")
    weights = config.gdpo_reward_weights or (1.0,) * len(names)
    if len(weights) != len(names):
        raise ValueError(f"gdpo_reward_weights has {len(weights)} numbers for {len(names)} parts of the reward")
    group = inputs.groups()
    total = torch.zeros_like(group.score)
    for name, weight in zip(names, weights, strict=True):
        part = group_scores(parts[name], inputs.mask, inputs.layout)
        total = total + weight * masked(_normalised(inputs, part), group.has_baseline)
    counted = is_trained(inputs.mask) & inputs.spread(group.has_baseline)
    advantages = whiten(inputs.spread(total), counted)
    return advantages, advantages


@ESTIMATORS.register("rloo")
def _rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """score - (n mean - score) / (n - 1), which is n / (n - 1) * (score - mean)."""
    group = inputs.groups()
    return _spread(
        inputs, masked((group.score - group.mean) * group.size / (group.size - 1).clamp(min=1), group.has_baseline)
    )


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    group = inputs.groups()
    counted = is_trained(inputs.mask) & inputs.spread(group.has_baseline)
    advantages = whiten(inputs.spread(group.score - group.mean), counted)
    return advantages, advantages


@ESTIMATORS.register("opo")
def _opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The baseline is the mean score of a group weighted by the episodes' trained tokens."""
    group = inputs.groups()
    tokens = inputs.layout.episode_counts(inputs.mask).double()
    return _spread(inputs, masked(group.score - group.weighted_mean(tokens), group.has_baseline))


@ESTIMATORS.register("gpg")
def _gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """score - group mean, scaled up by the share of episodes whose score is 0."""
    group = inputs.groups()
    scale = group.episodes.double() / group.nonzero.clamp(min=1)
    return _spread(inputs, masked(scale * (group.score - group.mean), group.has_baseline))


def _normalised(inputs: AdvantageInputs, group: GroupScores) -> Tensor:
    advantage = group.score - group.mean
    if inputs.config.norm_adv_by_std_in_grpo:
        advantage = advantage / (group.std + _STD_EPSILON)
    return masked(advantage, group.has_baseline)


def _spread(inputs: AdvantageInputs, per_sequence: Tensor) -> tuple[Tensor, Tensor]:
    advantages = inputs.spread(per_sequence)
    return advantages, advantages
