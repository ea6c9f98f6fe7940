"""The optimal baseline of each token: a group's returns at that point, weighted by how much each could have varied."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.aggregate import branch_weights
from agentrl.algorithm.estimators import ESTIMATORS, AdvantageInputs
from agentrl.algorithm.layout import TrainedTokens
from agentrl.algorithm.masking import is_trained, masked
from agentrl.algorithm.token_advantages import discounted_returns

_EPSILON = 1e-8


@ESTIMATORS.register("optimal_token_baseline")
def _optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Tokens are compared at the same distance from the beginning, observations in between counted."""
    return _advantages(inputs, TrainedTokens.of(inputs.layout, inputs.mask).placed(inputs.layout.places(inputs.mask)))


@ESTIMATORS.register("tir_optimal_token_baseline")
def _tir_optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Tokens are compared after the same number of trained ones: observations take no place."""
    return _advantages(inputs, TrainedTokens.of(inputs.layout, inputs.mask))


def _advantages(inputs: AdvantageInputs, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
    """G_t - sum(G_t W_t) / sum(W_t) over the sequences of a group that have a token at t; an episode's branches share
    the weight of one.

    W_t sums (1 - 2 p + sum(p^2)) w^2 over the tokens up to t: the expected squared norm of the score of a softmax,
    times the importance weight. Where one episode of a group goes on after all others have ended, it has no baseline;
    as in verl, ends are counted in trained tokens, so that with observations in between this is exact only for places
    counted so too.
    """
    trained = is_trained(inputs.mask)
    logp, squares = (masked(inputs.required(name), trained).double() for name in ("logp", "sum_pi_squared"))
    variation = 1 - 2 * logp.exp() + squares
    if inputs.importance_weights is not None:
        variation = variation * masked(inputs.importance_weights, trained).double().square()
    present = tokens.align(trained.double())
    rewards = tokens.align(masked(inputs.token_rewards, trained).double())
    returns = discounted_returns(rewards, 1.0) * present
    layout = inputs.layout
    weight = tokens.align(masked(variation, trained)).cumsum(1) * present
    weight = weight * branch_weights("episode", inputs.mask, layout).double()[:, None]

    _, group = layout.group.unique(return_inverse=True)
    shape = (layout.sequences, returns.shape[1])
    weighted = returns.new_zeros(shape).index_add(0, group, returns * weight)
    total = returns.new_zeros(shape).index_add(0, group, weight)
    baseline = (weighted / (total + _EPSILON))[group]

    longest, others = _lengths(present.sum(1), layout.episode, group)
    columns = torch.arange(shape[1], device=longest.device)
    alone = (longest > others)[:, None] & (columns >= others[:, None])
    has_baseline = inputs.groups().has_baseline
    advantages = torch.where(has_baseline[:, None], returns - torch.where(alone, 0.0, baseline), 0.0)
    return tokens.restore(advantages), tokens.restore(returns)


def _lengths(lengths: Tensor, episode: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """[S] the longest branch of each sequence's episode, and that of the other episodes of its group; 0 without any."""
    _, episode = episode.unique(return_inverse=True)
    zeros = lengths.new_zeros(len(lengths))
    of_episode = zeros.scatter_reduce(0, episode, lengths, "amax")
    group_of = torch.zeros_like(group).scatter(0, episode, group)
    best = zeros.scatter_reduce(0, group_of, of_episode, "amax")
    numbers = torch.arange(len(lengths), device=lengths.device)
    holder = numbers.new_full((len(lengths),), len(lengths))
    at_best = torch.where((of_episode == best[group_of]) & (of_episode > 0), numbers, len(lengths))
    holder = holder.scatter_reduce(0, group_of, at_best, "amin")
    rest = torch.where(numbers == holder[group_of], 0.0, of_episode)
    second = zeros.scatter_reduce(0, group_of, rest, "amax")
    others = torch.where(numbers == holder[group_of], second[group_of], best[group_of])
    return of_episode[episode], others[episode]
