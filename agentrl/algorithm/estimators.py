"""What advantage estimators get, and the registry they are found in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from agentrl.algorithm.group import GroupScores, group_scores
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.registry import Registry


@dataclass(frozen=True)
class AdvantageConfig:
    """The constants of the estimators.

    Attributes:
        norm_adv_by_std_in_grpo: divide by the group's standard deviation; False is Dr.GRPO. Read by `grpo`,
            `grpo_passk` and `gdpo`.
        gamma: discount per step, in [0, 1]; read by `gae` and `reinforce_plus_plus`.
        lam: lambda of `gae`, in [0, 1].
        gae_timestep: what a step of `gae` is: a trained `token`, or a `turn`.
        gdpo_reward_keys: the parts of the reward that `gdpo` normalises; none means all there are.
        gdpo_reward_weights: their weights; none means 1 each.
    """

    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    gae_timestep: Literal["token", "turn"] = "token"
    gdpo_reward_keys: tuple[str, ...] = ()
    gdpo_reward_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}: it lies in [0, 1]")
        if self.gae_timestep not in ("token", "turn"):
            raise ValueError(f"gae_timestep is {self.gae_timestep!r}: use token or turn")


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
    importance_weights: Tensor | None = None
    estimator: str = ""

    def required(self, name: str) -> Any:
        """An input that not every caller passes.

        Raises:
            ValueError: it was not passed.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"adv_estimator {self.estimator} needs {name}: pass it to compute_advantages")
        return value

    def groups(self) -> GroupScores:
        return group_scores(self.token_rewards, self.mask, self.layout)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] to [B, T] at trained positions, 0 elsewhere."""
        return self.layout.spread(per_sequence, self.mask)


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]

ESTIMATORS: Registry[Estimator] = Registry("adv_estimator", entry_points="agentrl.advantages")
"""Functions from `AdvantageInputs` to (advantages, returns), [B, T] in any float dtype."""
