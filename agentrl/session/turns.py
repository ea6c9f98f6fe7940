"""What the conversation layer passes around about one sampled turn, and what a chat format has to be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.record import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn in structured form.

    Attributes:
        tool_calls: those that are complete and valid; without an id where the model's format has none.
        invalid_tool_calls: raw text of those that are cut off or malformed; never repaired, never executed.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[str, ...] = ()

    def before(self, stop: Sequence[str]) -> ParsedTurn:
        """The same without the text that ended it, one of `stop`. Calls that were complete by then remain calls."""
        return ParsedTurn(
            _before(self.text, stop),
            _before(self.reasoning, stop),
            self.tool_calls,
            tuple(_before(raw, stop) for raw in self.invalid_tool_calls),
        )


def _before(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of `stop`. White space around it may have been stripped from the text's ends."""
    places = [text.find(ending) for ending in stop]
    stripped = [ending.strip() for ending in stop]
    places += [len(text) - len(ending) for ending in stripped if ending and text.endswith(ending)]
    return text[: min((place for place in places if place >= 0), default=len(text))].strip()


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn as it was recorded, with what led to it.

    Attributes:
        history: the messages it answered.
        message: the turn itself as an assistant message.
        prompt_ids: every token the engine saw before the first sampled one.
    """

    history: list[Message]
    message: Message
    prompt_ids: list[int]
    sampled_ids: list[int]


class Format(Protocol):
    """How one model's conversations look as tokens."""

    stop_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt for the next assistant turn, from nothing.

        Raises:
            MessageError: the model's template refuses the messages.
        """
        ...

    def bridge(self, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """The prompt for the turn after `new_messages`, on top of exactly the tokens of `turn`; None where that is not
        what the template says."""
        ...

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        """What a sampled turn says."""
        ...
