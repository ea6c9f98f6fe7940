"""The environment an agent acts in: first messages, tools, score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentrl.record import Message, Reply, Task
from agentrl.sdk.reward import RewardLike
from agentrl.sdk.tool import BoundTool, bound_tools


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished conversation, as `Env.score` judges it.

    Attributes:
        messages: everything said, tool answers included.
        replies: the model's turns.
        truncated: a limit ended it: tokens of a turn, turns, or context.
    """

    task: Task
    messages: list[Message]
    replies: list[Reply]
    truncated: bool

    @property
    def answer(self) -> str:
        """Text of the model's last turn."""
        return self.replies[-1].text if self.replies else ""


class Env:
    """An environment lives as long as its episode: built, `reset`, tools called, `score`d, `close`d.

    Methods marked `@tool` are what the model can call. When the machinery fails, so that nobody can judge the
    answer, raise `EnvError`: the episode is then counted and left out of training, not given a zero.
    """

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Raises a ValueError if the constructor can't work with these arguments; asked before any process starts."""

    async def reset(self, task: Task) -> list[Message]:
        """The first messages. Default: the task's own prompt."""
        return task.messages()

    async def score(self, transcript: Transcript) -> RewardLike:
        """What the conversation is worth."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def score(self, transcript)`")

    async def close(self) -> None:
        """Gives back what the episode held. Always called, also after failures."""

    def tools(self) -> dict[str, BoundTool]:
        """The tools the model may call now, by name. Default: all methods marked `@tool`."""
        return bound_tools(self)
