"""Estimators that place rewards: what a token is worth depends on what comes after it in its sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.estimators import ESTIMATORS, AdvantageInputs
from agentrl.algorithm.layout import TrainedTokens
from agentrl.algorithm.masking import is_trained, masked
from agentrl.algorithm.statistics import whiten


@ESTIMATORS.register("gae")
def _gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    values = inputs.required("values").double()
    tokens = TrainedTokens.of(inputs.layout, inputs.mask)
    if inputs.config.gae_timestep == "turn":
        advantages, returns = _turn_gae(inputs, tokens, values)
    else:
        rewards, aligned = tokens.align(inputs.token_rewards.double()), tokens.align(values)
        table = generalised_advantages(rewards, aligned, inputs.config.gamma, inputs.config.lam)
        advantages, returns = tokens.restore(table), tokens.restore(table + aligned)
    return whiten(advantages, is_trained(inputs.mask)), returns


@ESTIMATORS.register("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    tokens = TrainedTokens.of(inputs.layout, inputs.mask)
    returns = tokens.restore(discounted_returns(tokens.align(inputs.token_rewards.double()), inputs.config.gamma))
    return whiten(returns, is_trained(inputs.mask)), returns


@ESTIMATORS.register("remax")
def _remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    baselines = inputs.required("baselines")
    if baselines.shape != inputs.layout.episode.shape:
        raise ValueError(
            f"baselines has shape {list(baselines.shape)}: pass [S], the greedy reward of each sequence's task "
            f"(S = {inputs.layout.sequences})"
        )
    tokens = TrainedTokens.of(inputs.layout, inputs.mask)
    returns = tokens.restore(discounted_returns(tokens.align(inputs.token_rewards.double()), 1.0))
    return masked(returns - inputs.spread(baselines.double()), is_trained(inputs.mask)), returns


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """[S, L] return-to-go of each step: r_t + gamma r_(t+1) + ..., the sequences left-aligned."""
    if gamma == 1:
        return rewards.flip(1).cumsum(1).flip(1)
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for step in reversed(range(rewards.shape[1])):
        running = rewards[:, step] + gamma * running
        returns[:, step] = running
    return returns


def generalised_advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """[S, L] GAE of left-aligned steps, with value 0 after a sequence's end."""
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    return discounted_returns(rewards + gamma * following - values, gamma * lam)


def _turn_gae(inputs: AdvantageInputs, tokens: TrainedTokens, values: Tensor) -> tuple[Tensor, Tensor]:
    """One step a turn: its reward is that of all its tokens, its value that at its first token.

    All tokens of a turn get its advantage. So do their returns: each token's value is taught what the turn returns.
    """
    turn = inputs.layout.turns(inputs.mask).flatten()[tokens.position]
    begins = torch.ones_like(tokens.order, dtype=torch.bool)
    begins[1:] = (turn[1:] != turn[:-1]) | (tokens.sequence[1:] != tokens.sequence[:-1])
    step = begins.cumsum(0) - 1
    first_of_sequence = step[tokens.order == 0]
    begun = torch.zeros(tokens.sequences, dtype=torch.long, device=step.device)
    begun[tokens.sequence[tokens.order == 0]] = first_of_sequence
    number = step - begun[tokens.sequence]
    shape = (tokens.sequences, int(number.max()) + 1 if len(number) else 0)
    rewards = values.new_zeros(shape).index_put(
        (tokens.sequence, number), inputs.token_rewards.double().flatten()[tokens.position], accumulate=True
    )
    state = values.new_zeros(shape)
    state[tokens.sequence[begins], number[begins]] = values.flatten()[tokens.position[begins]]
    table = generalised_advantages(rewards, state, inputs.config.gamma, inputs.config.lam)
    return tuple(_at(tokens, part[tokens.sequence, number]) for part in (table, table + state))  # type: ignore[return-value]


def _at(tokens: TrainedTokens, values: Tensor) -> Tensor:
    """[N] values of the trained tokens to [B, T]."""
    result = values.new_zeros(tokens.shape.numel())
    result[tokens.position] = values
    return result.view(tokens.shape)
