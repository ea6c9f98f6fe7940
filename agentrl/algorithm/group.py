"""Outcomes of episodes and their statistics within a group; an episode counts once, whatever its branches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.layout import Layout


@dataclass(frozen=True, eq=False)
class GroupScores:
    """The score of each sequence's episode and the statistics of its group, each [S], fp64.

    Only usable episodes count: those with a trained token. A failed member, being absent, is in no statistic.

    Attributes:
        score: mean over the episode's sequences of the sum of their token rewards; 0 if not usable.
        mean: mean of the scores of the group's usable episodes.
        std: their standard deviation with Bessel's correction; 0 for fewer than two.
        size: their number.
    """

    score: Tensor
    mean: Tensor
    std: Tensor
    size: Tensor

    @property
    def has_baseline(self) -> Tensor:
        """[S] bool: at least one other usable member, without which a group baseline says nothing."""
        return self.size > 1


def group_scores(token_rewards: Tensor, mask: Tensor, layout: Layout) -> GroupScores:
    """Scores and group statistics from `token_rewards` [B, T], read at trained positions.

    Computed in fp64, means relative to the smallest value, so that equal scores are equal to their mean
    exactly. Synchronises with the host: once per batch.

    Raises:
        ValueError: sequences of one episode lie in different groups.
    """
    usable = layout.counts(mask) > 0
    sums = layout.sums(token_rewards.double(), mask)
    episodes, episode = layout.episode.unique(return_inverse=True)
    groups, group = layout.group.unique(return_inverse=True)
    group_of = group.new_zeros(len(episodes)).scatter(0, episode, group)
    if not torch.equal(group_of[episode], group):
        raise ValueError("layout.group differs between sequences of one episode: an episode is in one group")

    score, branches = _means(sums, episode, usable, len(episodes))
    mean, size = _means(score, group_of, branches > 0, len(groups))
    squares = torch.where(branches > 0, (score - mean[group_of]).square(), 0.0)
    variance = squares.new_zeros(len(groups)).index_add(0, group_of, squares) / (size - 1).clamp(min=1)
    return GroupScores(score[episode], mean[group], variance.sqrt()[group], size[group])


def _means(values: Tensor, index: Tensor, usable: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Mean and number of the usable `values` at each index 0..length-1; mean 0 where there are none."""
    values, index = values[usable], index[usable]
    count = values.new_zeros(length).index_add(0, index, torch.ones_like(values))
    least = values.new_zeros(length).scatter_reduce(0, index, values, "amin", include_self=False)
    excess = values.new_zeros(length).index_add(0, index, values - least[index])
    return least + excess / count.clamp(min=1), count
