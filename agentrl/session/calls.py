"""What a client may ask of one turn, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentrl.record import Message, Node, Reply, ToolSpec

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One turn, as an agent or a client of the gateway asks for it.

    Attributes:
        tool_choice: `none`: the model is not told of the tools, and what it writes is text. `required`: it must call
            one of them, the one called `tool_name` if that is given.
        one_call: the turn ends with its first tool call.
        stop: texts that end the turn, on top of those that the config gives.
        json_schema: JSON text; the turn says a value that fits it, unless it calls a tool.
        hides_reasoning: messages come back without the reasoning that belongs to them, since the client's protocol or
            framework has no place for it: it counts as if it were still there.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    one_call: bool = False
    max_tokens: int | None = None
    stop: Sequence[str] | None = None
    json_schema: str = ""
    hides_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A turn, with all that a protocol may want to tell of it.

    Attributes:
        text: what a client is shown: the reply's text, and tool calls that can't be executed as they were written.
        stop: the text that ended the turn, if one of the call's did.
        node: the turn as it is recorded.
    """

    reply: Reply
    text: str
    prompt_tokens: int
    node: Node = field(repr=False)
    stop: str = ""

    @property
    def message(self) -> Message:
        """The turn as the client will send it back."""
        return {**self.reply.message, "content": self.text}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What somebody outside said of an episode: what it earned, or why it can't be judged.

    Attributes:
        error: why there is no reward.
        blameless: that is the doing of infrastructure, not of the agent.
    """

    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    blameless: bool = False


class Door(Protocol):
    """Where agents of other frameworks reach their sessions.

    Attributes:
        base_url: for OpenAI's and Anthropic's clients alike.
        model: name under which the policy answers.
    """

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    def admit(self, session: Any) -> str:
        """Lets a session be used over HTTP, under the key that is returned."""
        ...

    def dismiss(self, session: Any) -> None:
        """The session is over: its key opens nothing any more."""
        ...
