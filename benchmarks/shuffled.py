"""A control: the same agent, its rewards shuffled among the episodes. Nothing should be learnt."""

from __future__ import annotations

import random
from collections import deque
from typing import ClassVar

from agentrl import Policy, Reward, Task
from agentrl.agents.math import MathAgent
from agentrl.sdk import as_reward


class ShuffledRewards(MathAgent):
    """Gives each training episode the reward of another one: the same distribution, and no information.

    Validation keeps its own rewards.
    """

    _pool: ClassVar[deque[float]] = deque(maxlen=512)

    async def run(self, task: Task, policy: Policy) -> Reward:
        own = as_reward(await super().run(task, policy))
        if task.split == "val":
            return own
        self._pool.append(own.value)
        return Reward(random.choice(self._pool), parts=own.parts)
