"""From what a batch's episodes earned to the advantage of each trained token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm import (
    AdvantageConfig,
    Layout,
    compute_advantages,
    kl_penalty,
    normalise,
    overlong_penalty,
    scaled,
)
from agentrl.config import RunConfig
from agentrl.config.names import COMPARE_EPISODES, ESTIMATOR_CONSTANTS
from agentrl.record import Trajectory
from agentrl.trainer.kl_control import KLController
from agentrl.trainer.packing import TrainingData, turn_credit


@dataclass(frozen=True, slots=True)
class Credit:
    """Columns `[1, N]` over the trained tokens, float32, and numbers for the metrics row."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]


class CreditAssigner:
    """Keeps the coefficient of the KL penalty from step to step. Computes on the CPU, in double precision."""

    def __init__(self, config: RunConfig) -> None:
        algorithm = config.algorithm
        self._algorithm = algorithm
        self._max_response = config.data.max_response_length
        self._config = AdvantageConfig(**{name: getattr(algorithm, name) for name in ESTIMATOR_CONSTANTS})
        control = algorithm.kl_ctrl
        target = control.target_kl if control.type == "adaptive" else None
        self._kl = KLController(control.kl_coef, target_kl=target, horizon=control.horizon)
        self._parts_found = False

    def assign(self, data: TrainingData) -> Credit:
        """The advantages of a whole batch.

        Args:
            data: with the columns that the estimator and the KL penalty need: `anchor_logp` (log-probs of the policy
                that anchors the update), `ref_logp`, `values`, `sum_pi_squared`, `importance_weights`.
        """
        columns = {name: column.cpu() for name, column in data.columns.items()}
        layout, mask = data.to(torch.device("cpu")).layout, torch.ones_like(columns["behav_logp"])
        rewards, metrics = self._rewards(data, columns["turn_rewards"].double())
        if self._algorithm.use_kl_in_reward:
            rewards, own = self._penalised(rewards, columns, layout)
            metrics |= own
        advantages, returns = compute_advantages(
            self._algorithm.adv_estimator,
            token_rewards=rewards,
            mask=mask,
            layout=layout,
            config=self._config,
            values=columns.get("values"),
            logp=columns.get("anchor_logp"),
            ref_logp=columns.get("ref_logp"),
            baselines=self._baselines(data),
            reward_parts=self._parts(data, rewards),
            sum_pi_squared=columns.get("sum_pi_squared"),
            importance_weights=columns.get("importance_weights"),
        )
        if self._algorithm.adv_norm is not None:
            advantages = normalise(advantages, mask, layout.group[layout.sequence], self._algorithm.adv_norm)
        return Credit(advantages.float(), returns.float(), metrics)

    def _rewards(self, data: TrainingData, turn_rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """`[1, N]` rewards in double precision: of turns where they end, of the episode at the end of each branch."""
        algorithm, sequences = self._algorithm, data.sequences
        first: dict[int, int] = {}
        for index, sequence in enumerate(sequences):
            first.setdefault(sequence.episode, index)
        episodes = [sequences[index] for index in first.values()]
        played = [episode.trajectory for episode in episodes]
        penalties = self._penalties(played)
        outcomes = self._outcomes(played, penalties)
        metrics = {}
        if algorithm.overlong_buffer_len is not None:
            metrics["reward/overlong_penalty"] = float(penalties.mean())
        if algorithm.reward_norm is not None:
            groups = torch.tensor([episode.group for episode in episodes])
            outcomes = normalise(outcomes, torch.ones(len(episodes)), groups, algorithm.reward_norm)
        number = {episode: place for place, episode in enumerate(first)}
        outcome = outcomes[torch.tensor([number[sequence.episode] for sequence in sequences])]
        if algorithm.adv_estimator in COMPARE_EPISODES:
            elsewhere = torch.tensor([sequence.elsewhere for sequence in sequences], dtype=torch.float64)
            outcome = outcome + elsewhere * algorithm.reward_scaling
        rewards = turn_rewards * algorithm.reward_scaling
        rewards[0, data.last_tokens.cpu()] += outcome
        return rewards, metrics

    def _outcomes(self, episodes: list[Trajectory], penalties: Tensor) -> Tensor:
        """`[E]` rewards of episodes, without those of their turns."""
        algorithm = self._algorithm
        rewards = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64) + penalties
        return scaled(rewards, scale=algorithm.reward_scaling, bias=algorithm.reward_bias, clip=algorithm.reward_clip)

    def _penalties(self, episodes: list[Trajectory]) -> Tensor:
        """`[E]` what each episode loses for its length, by its longest turn."""
        buffer = self._algorithm.overlong_buffer_len
        if buffer is None:
            return torch.zeros(len(episodes))
        turns = [[turn for branch in episode.branches for turn in branch.turns] for episode in episodes]
        return overlong_penalty(
            torch.tensor([max(turn.end - turn.start for turn in own) for own in turns]),
            max_length=self._max_response,
            buffer=buffer,
            factor=self._algorithm.overlong_penalty_factor,
        )

    def _penalised(
        self, rewards: Tensor, columns: dict[str, Tensor], layout: Layout
    ) -> tuple[Tensor, dict[str, float]]:
        penalty = kl_penalty(columns["anchor_logp"].double(), columns["ref_logp"].double(), self._algorithm.kl_penalty)
        # The mean over sequences of their means over tokens, which is what a coefficient is steered by.
        mask = torch.ones_like(penalty)
        mean = float((layout.sums(penalty, mask) / layout.counts(mask)).mean())
        coefficient = self._kl.value
        self._kl.update(mean, len(layout.episode.unique()))
        return rewards - coefficient * penalty, {"reward/kl": mean, "reward/kl_coef": coefficient}

    def _baselines(self, data: TrainingData) -> Tensor | None:
        """`[S]` what the greedy episode of each sequence's task earned along a branch, if it has several on average."""
        greedy = {sequence.group: sequence.greedy for sequence in data.sequences}
        played = {group: episode for group, episode in greedy.items() if episode is not None}
        if len(played) < len(greedy):
            return None
        episodes = list(played.values())
        outcomes = self._outcomes(episodes, self._penalties(episodes)).tolist()
        credits = [sum(map(turn_credit, episode.branches)) / len(episode.branches) for episode in episodes]
        scale = self._algorithm.reward_scaling
        earned = {
            group: outcome + credit * scale for group, outcome, credit in zip(played, outcomes, credits, strict=True)
        }
        return torch.tensor([earned[sequence.group] for sequence in data.sequences], dtype=torch.float64)

    def _parts(self, data: TrainingData, rewards: Tensor) -> dict[str, Tensor] | None:
        """Each part of the reward that is compared, at the end of each branch; 0 where an episode has no such part.

        Raises:
            ValueError: no episode of the first batch has it: the name is wrong, or an environment keeps silent.
        """
        if self._algorithm.adv_estimator != "gdpo":
            return None
        known = {name for sequence in data.sequences for name in sequence.trajectory.reward_parts}
        unknown = [name for name in self._algorithm.gdpo_reward_keys if name not in known]
        if unknown and not self._parts_found:
            raise ValueError(
                f"algorithm.gdpo_reward_keys: no episode has a reward part {', '.join(unknown)}; they have "
                f"{', '.join(sorted(known)) or 'none'}. A part that was not earned is to be reported as 0"
            )
        self._parts_found = True
        parts = {name: torch.zeros_like(rewards) for name in self._algorithm.gdpo_reward_keys}
        for name, column in parts.items():
            values = [sequence.trajectory.reward_parts.get(name, 0.0) for sequence in data.sequences]
            column[0, data.last_tokens.cpu()] = torch.tensor(values, dtype=column.dtype)
        return parts
