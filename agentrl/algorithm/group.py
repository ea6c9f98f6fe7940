"""Outcomes of episodes and their statistics within a group; an episode counts once, whatever its branches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.layout import Layout
from agentrl.algorithm.statistics import means


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
    _members: _Members

    @property
    def has_baseline(self) -> Tensor:
        """[S] bool: at least one other usable member, without which a group baseline says nothing."""
        return self.size > 1

    @property
    def episodes(self) -> Tensor:
        """The number of usable episodes, a scalar."""
        return self._members.usable.sum()

    @property
    def nonzero(self) -> Tensor:
        """The number of usable episodes whose score is not 0, a scalar."""
        return (self._members.usable & (self._members.score != 0)).sum()

    def weighted_mean(self, weight: Tensor) -> Tensor:
        """[S] mean of the scores of the group's usable episodes; `weight` [S] is that of each sequence's episode."""
        members = self._members
        return members.to_sequences(means(members.score, members.group, members.of_episodes(weight), members.groups)[0])

    def runner_up(self) -> tuple[Tensor, Tensor]:
        """The second best score of each sequence's group, and whether the sequence's episode is the best of it, the
        first of equals; [S] each. With equals at the top the second best is the best."""
        members = self._members
        score, group = members.score, members.group
        numbers = torch.arange(len(score), device=score.device)
        lowest, last = float("-inf"), len(score)
        eligible = torch.where(members.usable, score, lowest)
        best = score.new_full((members.groups,), lowest).scatter_reduce(0, group, eligible, "amax")
        at_top = members.usable & (score == best[group])
        first = numbers.new_full((members.groups,), last)
        first = first.scatter_reduce(0, group, torch.where(at_top, numbers, last), "amin")
        is_best = numbers == first[group]
        others = torch.where(is_best, lowest, eligible)
        second = score.new_full((members.groups,), lowest).scatter_reduce(0, group, others, "amax")
        second = torch.where(second.isfinite(), second, best)
        return members.to_sequences(second), is_best[members.episode]


@dataclass(frozen=True, eq=False)
class _Members:
    """The episodes of a batch, E of them in any order.

    Attributes:
        score, usable, group: [E].
        episode, sequence_group: [S] the episode and group of each sequence, as numbers from 0.
        groups: number of groups.
    """

    score: Tensor
    usable: Tensor
    group: Tensor
    episode: Tensor
    sequence_group: Tensor
    groups: int

    def to_sequences(self, per_group: Tensor) -> Tensor:
        return per_group[self.sequence_group]

    def of_episodes(self, per_sequence: Tensor) -> Tensor:
        """[E] of values that are the same for all sequences of an episode, 0 where it is not usable."""
        values = per_sequence.new_zeros(len(self.score)).scatter(0, self.episode, per_sequence)
        return torch.where(self.usable, values, 0.0)


def group_scores(token_rewards: Tensor, mask: Tensor, layout: Layout) -> GroupScores:
    """Scores and group statistics from `token_rewards` [B, T], read at trained positions.

    Computed in fp64, means relative to the smallest value, so that equal scores are equal to their mean
    exactly. Synchronises with the host: once per batch.

    Raises:
        ValueError: sequences of one episode lie in different groups.
    """
    trained = (layout.counts(mask) > 0).double()
    sums = layout.sums(token_rewards.double(), mask)
    episodes, episode = layout.episode.unique(return_inverse=True)
    groups, group = layout.group.unique(return_inverse=True)
    group_of = group.new_zeros(len(episodes)).scatter(0, episode, group)
    if not torch.equal(group_of[episode], group):
        raise ValueError("layout.group differs between sequences of one episode: an episode is in one group")

    score, branches = means(sums, episode, trained, len(episodes))
    usable = branches > 0
    mean, size = means(score, group_of, usable.double(), len(groups))
    squares = torch.where(usable, (score - mean[group_of]).square(), 0.0)
    variance = squares.new_zeros(len(groups)).index_add(0, group_of, squares) / (size - 1).clamp(min=1)
    members = _Members(score, usable, group_of, episode, group, len(groups))
    return GroupScores(score[episode], mean[group], variance.sqrt()[group], size[group], members)
