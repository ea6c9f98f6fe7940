"""Finding the turn that a history continues, among all that were recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.record import Message, ToolSpec
from agentrl.session.turns import SampledTurn

_HIDDEN = None
"""Stands for reasoning that a client does not show."""


@dataclass(slots=True)
class _Node:
    """A message in a tree of histories; `turn` is the latest one that was sampled as this message."""

    children: dict[Any, _Node] = field(default_factory=dict)
    turn: SampledTurn | None = None

    def child(self, key: Any, reasoning: str, hides_reasoning: bool) -> _Node | None:
        hidden = self.children.get((key, _HIDDEN)) if hides_reasoning and not reasoning else None
        return hidden or self.children.get((key, reasoning))


class KnownTurns:
    """The turns of an episode, by the history that ends with them.

    A tree, so that finding one takes as long as the history asked about, however many are recorded. Messages count as
    the same whatever a client did to white space and ids, and if it says so, without the reasoning they had.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def add(
        self,
        turn: SampledTurn,
        tools: Sequence[ToolSpec],
        seen: Sequence[Message] | None = None,
        *,
        hides_reasoning: bool = False,
    ) -> None:
        """Records a turn.

        Args:
            seen: the history and the turn as the client knows them; by default as they were recorded.
            hides_reasoning: as in `continued_by`.
        """
        node = self._root.children.setdefault(_json(list(tools)), _Node())
        for message in (*turn.history, turn.message) if seen is None else seen:
            key, reasoning = _key(message)
            child = node.child(key, reasoning, hides_reasoning)
            if child is None:
                child = node.children[key, reasoning] = _Node()
            if reasoning:
                node.children[key, _HIDDEN] = child
            node = child
        node.turn = turn

    def continued_by(
        self, history: Sequence[Message], tools: Sequence[ToolSpec], *, hides_reasoning: bool = False
    ) -> SampledTurn | None:
        """The longest recorded turn that `history` goes on from with the same tools; the latest of equals.

        Args:
            hides_reasoning: a message without reasoning may have had any.
        """
        found: SampledTurn | None = None
        node = self._root.children.get(_json(list(tools)))
        for message in history[:-1]:
            if node is None:
                break
            node = node.child(*_key(message), hides_reasoning)
            found = (node.turn if node is not None else None) or found
        return found


def _key(message: Message) -> tuple[Any, str]:
    """What makes a message the same as another one, and the reasoning it has."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    said = message["role"], message["content"].strip(), _json(calls) if calls else ""
    return said, message.get("reasoning_content", "").strip()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
