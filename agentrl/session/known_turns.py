"""Finding the turn that a history continues, among all that were recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.record import Message, ToolSpec
from agentrl.session.turns import SampledTurn


@dataclass(slots=True)
class _Node:
    """A message in a tree of histories; `turn` is the latest one that was sampled as this message."""

    children: dict[Any, _Node] = field(default_factory=dict)
    turn: SampledTurn | None = None


class KnownTurns:
    """The turns of an episode, by the history that ends with them.

    A tree, so that finding one takes as long as the history asked about, however many are recorded. Messages count as
    the same whatever a client did to white space and ids.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, turn: SampledTurn, tools: Sequence[ToolSpec]) -> None:
        node = self._root
        for key in _keys([*turn.history, turn.message], tools):
            node = node.children.setdefault(key, _Node())
        node.turn = turn

    def continued_by(self, history: Sequence[Message], tools: Sequence[ToolSpec]) -> SampledTurn | None:
        """The longest recorded turn that `history` goes on from with the same tools; the latest of equals."""
        found: SampledTurn | None = None
        node: _Node | None = self._root
        for key in _keys(history[:-1], tools):
            node = node.children.get(key)
            if node is None:
                break
            found = node.turn or found
        return found


def _keys(history: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Any]:
    return [_json(list(tools)), *map(_key, history)]


def _key(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    said = message["content"].strip(), message.get("reasoning_content", "").strip()
    return message["role"], *said, _json(calls) if calls else ""


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
