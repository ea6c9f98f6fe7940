"""Arithmetic whose tools take their time: the published latency of `async_speedup.py`.

Log-normal with a median of 0.2 s and a standard deviation of 1.25 in the logarithm, cut at 20 s: a mean of 0.44 s, one
episode in a hundred over 3.7 s, one in a thousand over 9.5 s. The draws come from a fixed seed, in the order in which
episodes start.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterator

from agentrl.envs.math import ArithmeticEnv
from agentrl.sdk import Reward, Transcript, tool

MEDIAN_SECONDS = 0.2
SIGMA = 1.25
LONGEST_SECONDS = 20.0
LONG_SECONDS = 1.0
"""An episode with a greater latency counts as long."""


def latencies() -> Iterator[float]:
    """Seconds, one number an episode; the same ones every time."""
    draws = random.Random(20260101)
    while True:
        yield min(LONGEST_SECONDS, math.exp(draws.gauss(math.log(MEDIAN_SECONDS), SIGMA)))


def long_share(episodes: int) -> float:
    """The share of long ones among the first so many episodes."""
    return sum(latency > LONG_SECONDS for latency in itertools.islice(latencies(), episodes)) / max(1, episodes)


_draws = latencies()


class SlowArithmeticEnv(ArithmeticEnv):
    """`ArithmeticEnv` where each episode waits for its latency once: at its first tool call, or, if it makes none, when
    it is scored. So the load does not depend on what the policy has learnt."""

    def __init__(self) -> None:
        self._latency = next(_draws)
        self._waited = False

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression."""
        await self._wait()
        return await super().calculator(expression)

    async def score(self, transcript: Transcript) -> Reward:
        await self._wait()
        reward = await super().score(transcript)
        return Reward(reward.value, {**reward.parts, "long": float(self._latency > LONG_SECONDS)})

    async def _wait(self) -> None:
        if not self._waited:
            self._waited = True
            await asyncio.sleep(self._latency)
