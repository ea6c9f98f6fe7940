"""A policy that says what a test wants, without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.record import Completion, Reply, ToolCall


class ScriptedPolicy:
    """Implements `sdk.Policy`: gives the replies one by one, or raises them; keeps what it was asked."""

    base_url = api_key = model = ""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.asked: list[list[Mapping[str, Any]]] = []
        self.tools: list[Sequence[Any] | None] = []
        self._replies = list(replies)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        self.asked.append(list(messages))
        self.tools.append(tools)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Completion:
        raise NotImplementedError

    def reward(self, value: float, turn: int | None = None) -> None:
        raise NotImplementedError


def answer(text: str) -> Reply:
    return Reply(text, "", (), "stop", 0)


def calls(*names_and_arguments: tuple[str, dict[str, Any]], text: str = "") -> Reply:
    """A turn with tool calls; their ids are c0, c1, ..."""
    made = tuple(ToolCall(name, arguments, f"c{i}") for i, (name, arguments) in enumerate(names_and_arguments))
    return Reply(text, "", made, "tool_calls", 0)
