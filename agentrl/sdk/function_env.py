"""An environment made of one function: the reward."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, cast

from agentrl.record import Message, Task
from agentrl.sdk.env import Env, Transcript
from agentrl.sdk.plugin import load_object
from agentrl.sdk.prompts import with_system_prompt
from agentrl.sdk.reward import RewardLike

RewardFunction = Callable[[Transcript], RewardLike | Awaitable[RewardLike]]


class FunctionEnv(Env):
    """No tools, the task's own prompt, and a function that scores the answer.

    Args:
        reward: `package.module:function`, or an entry point of the group `agentrl.rewards`. It gets the `Transcript`
            and returns a number or `Reward`, or is `async def` and does so. A plain function must be quick: all
            episodes share one event loop.
        system_prompt: said before the task's prompt, if not empty and the task has none of its own.
    """

    def __init__(self, reward: str, *, system_prompt: str = "") -> None:
        self._reward = _load(reward)
        self._system_prompt = system_prompt

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        _load(arguments["reward"])

    async def reset(self, task: Task) -> list[Message]:
        return with_system_prompt(self._system_prompt, task)

    async def score(self, transcript: Transcript) -> RewardLike:
        result: Any = self._reward(transcript)
        return await result if inspect.isawaitable(result) else result


@cache  # an environment is built for every episode, and entry points are searched for on disk
def _load(reward: str) -> RewardFunction:
    if not isinstance(reward, str):
        raise ValueError(f"env.args.reward is {reward!r}: use package.module:function")
    function: Any = load_object(reward, key="env.args.reward", group="agentrl.rewards")
    if not callable(function):
        raise ValueError(f"{reward} is {function!r}: name a function")
    return cast(RewardFunction, function)
