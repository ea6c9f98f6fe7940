"""A control: the same agent, its rewards shuffled among the episodes. Nothing should be learnt."""

from __future__ import annotations

import random
from typing import ClassVar

from agentrl import Policy, Reward, Task
from agentrl.agents.math import MathAgent
from agentrl.sdk import as_reward

_POOL = 512
_BASE_ACCURACY = 0.34


class ShuffledRewards(MathAgent):
    """Swaps each training episode's reward with one from a pool: every reward is given once, to a random episode.

    The pool starts with the base policy's share of ones. It is large against the episodes in flight, so that when an
    episode ends (and episodes with a call end later) says nothing about the reward it gets. Validation keeps its own.
    """

    _pool: ClassVar[list[float]] = [float(slot < _BASE_ACCURACY * _POOL) for slot in range(_POOL)]

    async def run(self, task: Task, policy: Policy) -> Reward:
        own = as_reward(await super().run(task, policy))
        if task.split == "val":
            return own
        slot = random.randrange(_POOL)
        other, self._pool[slot] = self._pool[slot], own.value
        return Reward(other, parts=own.parts)
