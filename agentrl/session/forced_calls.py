"""Turns that must be a tool call: the model's own way of writing calls, with JSON sampled by a schema in its middle.

How a model writes a call is found out by rendering one. Where its template writes the whole call, or at least the
arguments, as JSON, a turn can be forced: what stands before the JSON becomes part of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.record import Message, MessageError, ToolCall, ToolSpec

_NAME = "qztool"
_ARGUMENTS = {"qzarg": "qzcall"}
_USER: Message = {"role": "user", "content": "qzaske"}
PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"qzarg": {"type": "string"}}, "required": ["qzarg"]},
    },
}
PROBE_HISTORY: list[Message] = [_USER]
PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
PROBE_RESULT: Message = {"role": "tool", "content": "qzdone", "tool_call_id": "call00000", "name": _NAME}


@dataclass(frozen=True, slots=True)
class CallFrame:
    """How a model writes a tool call.

    Attributes:
        before: what comes before the JSON; if `name_key` is empty, with the tool's name in the place of `{name}`.
        after: what comes after it, up to the end of the call.
        name_key, arguments_key: of the JSON object; both are empty where the arguments alone are JSON.
    """

    before: str
    after: str
    name_key: str = ""
    arguments_key: str = ""

    @classmethod
    def found_in(cls, written: str) -> CallFrame | None:
        """The frame of the call `PROBE_CALL` as a template writes it; None if it is not JSON."""
        decoder = json.JSONDecoder()
        name = written.find(_NAME)
        arguments = [place for place in _places(written, "{") if _starts_with(decoder, written, place, _ARGUMENTS)]
        if name < 0 or not arguments:
            return None
        for place in reversed([place for place in _places(written, "{") if place < min(name, arguments[0])]):
            value, end = _decoded(decoder, written, place)
            if isinstance(value, dict):
                name_key = next((key for key, inner in value.items() if inner == _NAME), None)
                arguments_key = next((key for key, inner in value.items() if inner == _ARGUMENTS), None)
                if name_key and arguments_key:
                    return cls(written[:place], written[end:], name_key, arguments_key)
        if name > arguments[0]:
            return None
        _, end = _decoded(decoder, written, arguments[0])
        before = written[: arguments[0]]
        return cls(before.replace("{", "{{").replace("}", "}}").replace(_NAME, "{name}"), written[end:])

    def start(self, name: str) -> str:
        """What is written before the JSON of a call of that tool."""
        return self.before if self.name_key else self.before.format(name=name)

    def schema(self, tools: Sequence[ToolSpec]) -> str:
        """JSON text of the schema of a call of one of these tools.

        Raises:
            MessageError: several, of a model that does not write their names as JSON.
        """
        functions = [tool.get("function", tool) for tool in tools]
        if not self.name_key and len(functions) > 1:
            raise MessageError(
                "tool_choice: this model can't be made to call one of several tools, only a tool that is named",
                field="tool_choice",
            )
        definitions: dict[str, Any] = {}
        calls = []
        for number, function in enumerate(functions):
            given = function.get("parameters") or {"type": "object"}
            if not self.name_key:
                return json.dumps(given)
            parameters, own = _moved(given, f"tool{number}")
            definitions |= own
            calls.append(
                {
                    "type": "object",
                    "properties": {self.name_key: {"enum": [function["name"]]}, self.arguments_key: parameters},
                    "required": [self.name_key, self.arguments_key],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return json.dumps({**schema, "$defs": definitions} if definitions else schema)

    def read(self, text: str, name: str) -> ToolCall | None:
        """The call that was sampled; None if it is not complete."""
        try:
            value = json.loads(text)
        except ValueError:
            return None
        called: Any = name
        if self.name_key and isinstance(value, dict):
            called, value = value.get(self.name_key), value.get(self.arguments_key)
        return ToolCall(called, value) if isinstance(called, str) and isinstance(value, dict) else None


def _moved(schema: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema in a form that can stand inside another one, and the definitions that go into that one's `$defs`.

    Its own definitions get names of their own; if it refers to itself or to other parts of it, it becomes a definition
    as a whole.

    Raises:
        MessageError: definitions that are none.
    """
    definitions: dict[str, Any] = {}
    for key in ("definitions", "$defs"):
        given = schema.get(key) or {}
        if not isinstance(given, dict):
            raise MessageError(f"tools: {key} of a tool's parameters is {given!r}: use an object", field="tools")
        definitions |= given
    whole = False

    def moved(value: Any) -> Any:
        nonlocal whole
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        result = {key: moved(item) for key, item in value.items()}
        ref = value.get("$ref")
        if isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")):
            result["$ref"] = f"#/$defs/{name}_{ref.split('/', 2)[2]}"
        elif isinstance(ref, str) and ref.startswith("#"):
            whole = True
            result["$ref"] = f"#/$defs/{name}{ref[1:]}"
        return result

    body = moved({key: value for key, value in schema.items() if key not in ("$defs", "definitions")})
    own = {f"{name}_{key}": moved(value) for key, value in definitions.items()}
    return ({"$ref": f"#/$defs/{name}"}, {**own, name: body}) if whole else (body, own)


def _places(text: str, mark: str) -> list[int]:
    return [place for place, letter in enumerate(text) if letter == mark]


def _decoded(decoder: json.JSONDecoder, text: str, place: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, place)
    except ValueError:
        return None, place


def _starts_with(decoder: json.JSONDecoder, text: str, place: int, value: Any) -> bool:
    return _decoded(decoder, text, place)[0] == value
