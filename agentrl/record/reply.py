"""What a model call gives back to the agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.record.messages import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete, well-formed tool call of the model.

    Attributes:
        arguments: the parsed JSON object.
        id: what the tool's answer refers to as `tool_call_id`.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model.

    Attributes:
        text: what it said, without reasoning and tool calls.
        reasoning: what stood between its thinking marks, if anything.
        tool_calls: complete calls only. A call that was cut off or is not valid JSON is in `invalid_tool_calls`,
            as it was written; it must not be executed.
        finish_reason: `stop`, `tool_calls`, or `length` if `max_tokens` cut the turn.
        turn: number of the turn within the episode, for `policy.reward(value, turn=...)`.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "tool_calls", "length"]
    turn: int
    invalid_tool_calls: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The turn as an assistant message, to append to the history."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn at token level: sampled ids and their log-probs under the sampling distribution."""

    token_ids: list[int]
    logprobs: list[float] = field(repr=False)
    finish_reason: Literal["stop", "length"]
    turn: int
