"""What an episode earned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import msgspec

from agentrl.record.codec import decode, encode


@dataclass(frozen=True, slots=True)
class Reward:
    """The outcome of an episode.

    Attributes:
        value: what the policy is trained on.
        parts: named parts of it, kept for the report. The part `accuracy`, if there is one, is what validation
            counts as solved.
        info: anything else worth keeping with the trajectory; JSON values.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def solved(self) -> bool:
        """Whether validation counts the episode as solved."""
        return self.parts.get("accuracy", self.value) >= 1.0


RewardLike = Reward | float | int | bool


def as_reward(value: Any) -> Reward:
    """What `AgentLoop.run` or `Env.score` returned, as a `Reward`.

    Raises:
        TypeError: not a number or Reward, or `info` that no file can hold.
        ValueError: not finite.
    """
    if isinstance(value, Reward):
        parts = {name: float(part) for name, part in value.parts.items()}
        reward = Reward(float(value.value), parts, value.info)
    elif isinstance(value, SupportsFloat):
        reward = Reward(float(value))
    else:
        raise TypeError(
            f"the reward must be a number or Reward(value, parts={{...}}), but is {value!r}: "
            "return it from AgentLoop.run or Env.score"
        )
    for name, number in (("the reward", reward.value), *reward.parts.items()):
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, but is {number}")
    try:
        decode(encode(reward), Reward)
    except (NotImplementedError, msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"Reward.info must hold JSON values under text keys: {error}") from None
    return reward
