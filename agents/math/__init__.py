"""Agents for mathematics."""

from __future__ import annotations

from agentrl.record import Message, Task
from agentrl.sdk import Env, RewardLike, ToolAgentLoop, Transcript
from agentrl.sdk.tool import BoundTool

__all__ = ["MathAgent", "SingleTurnAgent"]


class MathAgent(ToolAgentLoop):
    """Works on a problem with the environment's tools, in few turns: a call, its result, the answer."""

    def __init__(self, env: Env, *, max_turns: int = 4, max_tool_output: int = 512) -> None:
        super().__init__(env, max_turns=max_turns, max_tool_output=max_tool_output)


class SingleTurnAgent(ToolAgentLoop):
    """Answers in one turn, in an environment without tools, which gives the first messages and the score."""

    def __init__(self, env: Env) -> None:
        super().__init__(_WithoutTools(env), max_turns=1)


class _WithoutTools(Env):
    """An environment, held to have no tools: a call needs a second turn."""

    def __init__(self, env: Env) -> None:
        self._env = env

    async def reset(self, task: Task) -> list[Message]:
        return await self._env.reset(task)

    async def score(self, transcript: Transcript) -> RewardLike:
        return await self._env.score(transcript)

    def tools(self) -> dict[str, BoundTool]:
        tools = self._env.tools()
        if tools:
            raise ValueError(
                f"agent.loop is SingleTurnAgent, which calls no tools, and {type(self._env).__name__} offers "
                f"{', '.join(tools)}: set agent.loop to agentrl.agents.math:MathAgent, "
                "or MathEnv's env.args.tools to none"
            )
        return tools
