"""Agents for mathematics."""

from __future__ import annotations

from agentrl.sdk import Env, ToolAgentLoop

__all__ = ["MathAgent"]


class MathAgent(ToolAgentLoop):
    """Works on a problem with the environment's tools, in few turns: a call, its result, the answer."""

    def __init__(self, env: Env, *, max_turns: int = 4, max_tool_output: int = 512) -> None:
        super().__init__(env, max_turns=max_turns, max_tool_output=max_tool_output)
