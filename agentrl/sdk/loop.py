"""Agent loops: how an episode is played."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from agentrl.record import AgentRLError, ContextOverflow, EnvError, Message, Reply, Task, ToolCall
from agentrl.sdk.env import Env, Transcript
from agentrl.sdk.policy import Policy
from agentrl.sdk.reward import Reward, RewardLike, as_reward
from agentrl.sdk.tool import BoundTool, ToolError

T = TypeVar("T")


class AgentLoop:
    """Subclass it and define `run`; name the class in the config as `agent.loop: my_module:MyLoop`.

    A new instance is built for every episode, with `agent.args` as keyword arguments, and `env=` with a fresh
    environment if the config has an `env.cls`. So state on `self` belongs to one episode.
    """

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Raises a ValueError if the constructor can't work with these arguments; asked before any process starts."""

    def run(self, task: Task, policy: Policy) -> Awaitable[RewardLike] | RewardLike:
        """Plays one episode with `policy` and returns its reward.

        Either `async def`, or a plain function: that runs in a thread of its own, and the calls of its policy
        (a `SyncPolicy`) block. An exception ends the episode as an agent error: it is counted and, unless
        `rollout.on_agent_error` says otherwise, left out of training.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def run(self, task, policy)`")


class OutsideAgent(AgentLoop):
    """Episodes are played by whoever asks for one over HTTP: see `agentrl serve`."""


class ToolAgentLoop(AgentLoop):
    """The ready multi-turn loop: the model calls the environment's tools until it answers without a call.

    Args:
        env: where the tools, the first messages and the score come from.
        max_turns: most turns of the model.
        max_tool_output: most characters of a tool's answer that the model gets to see.
    """

    def __init__(self, env: Env, *, max_turns: int = 8, max_tool_output: int = 8192) -> None:
        self.env = env
        self.max_turns = max_turns
        self.max_tool_output = max_tool_output

    async def run(self, task: Task, policy: Policy) -> RewardLike:
        messages = await _judged(self.env.reset(task))
        tools = self.env.tools()
        specs = [tool.spec for tool in tools.values()] or None
        replies: list[Reply] = []
        finished = False
        while len(replies) < self.max_turns and not finished:
            try:
                reply = await policy.chat(messages, tools=specs)
            except ContextOverflow:
                if not replies:
                    raise
                break
            replies.append(reply)
            messages = [*messages, reply.message]
            if reply.finish_reason == "length":
                break
            messages += [await self._answer(tools, call) for call in reply.tool_calls]
            messages += [_refusal(raw) for raw in reply.invalid_tool_calls]
            finished = not reply.tool_calls and not reply.invalid_tool_calls
        return await _judged(_score(self.env, Transcript(task, messages, replies, truncated=not finished)))

    async def _answer(self, tools: dict[str, BoundTool], call: ToolCall) -> Message:
        try:
            if call.name not in tools:
                raise ToolError(f"no tool {call.name!r}; there are: {', '.join(tools) or 'none'}")
            content = await _judged(tools[call.name](call.arguments), passes=(AgentRLError, ToolError))
        except ToolError as error:
            content = f"Error: {error}"
        return _tool_message(content[: self.max_tool_output], call.name, call.id)


async def _score(env: Env, transcript: Transcript) -> Reward:
    # What is no reward is the environment's mistake, not the agent's.
    return as_reward(await env.score(transcript))


async def _judged(work: Awaitable[T], passes: tuple[type[Exception], ...] = (AgentRLError,)) -> T:
    """What the environment answers; a crash of its own code is a failure of the machinery, not a judgement."""
    try:
        return await work
    except passes:
        raise
    except Exception as error:
        raise EnvError(f"{type(error).__name__}: {error}") from error


def _refusal(raw: str) -> Message:
    return _tool_message(f"Error: not a valid tool call: {raw[:200]}", "", "")


def _tool_message(content: str, name: str, call_id: str) -> Message:
    message: dict[str, Any] = {"role": "tool", "content": content}
    if call_id:
        message["tool_call_id"] = call_id
    if name:
        message["name"] = name
    return message
