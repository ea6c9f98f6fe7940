"""Chat messages as every room sees them: plain dictionaries in the OpenAI Chat format, normalised once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
ToolSpec = dict[str, Any]
"""An OpenAI tool specification: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

ROLES = ("system", "user", "assistant", "tool")


class MessageError(ValueError):
    """A message list that no chat template can render; says which message and what to change.

    Attributes:
        field: of the request, what is wrong with it.
    """

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies `messages` into the one form the renderers and the message graph work on.

    `content: null` becomes an empty string, text parts are joined, `developer` becomes `system`, tool-call
    arguments sent as a JSON string become an object. Arguments that are not valid JSON stay the string they
    were: history is what happened, and must render rather than raise.

    Raises:
        MessageError: empty list, a message without a known role, content that is not text, or a tool call that is
            not an object.
    """
    if not messages:
        raise MessageError("messages is empty: pass at least one message, e.g. [{'role': 'user', 'content': 'hi'}]")
    return [_normalise(index, message) for index, message in enumerate(messages)]


def _normalise(index: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise MessageError(f"messages[{index}] is {message!r}: use an object with role and content")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise MessageError(f"messages[{index}].role is {role!r}: use one of {', '.join(ROLES)}")
    result: Message = {"role": role, "content": _text(index, message.get("content"))}
    if message.get("function_call"):
        raise MessageError(f"messages[{index}].function_call: use tool_calls, and a message of the role tool")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise MessageError(f"messages[{index}].tool_calls is {calls!r}: use a list")
        result["tool_calls"] = [_tool_call(index, call) for call in calls]
    for key in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    return result


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MessageError(f"messages[{index}].content is {content!r}: use a string or a list of text parts")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise MessageError(f"messages[{index}].content holds a part of type {kind!r}: only text is supported")
        parts.append(text)
    return "".join(parts)


def _tool_call(index: int, call: Any) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"messages[{index}].tool_calls holds {call!r}: use an object with function.name")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            parsed = None
        arguments = without_surrogates(parsed) if isinstance(parsed, dict) else arguments
    return {
        "type": "function",
        "id": str(call.get("id") or ""),
        "function": {"name": function["name"], "arguments": arguments},
    }


def without_surrogates(value: Any) -> Any:
    """A JSON value with halves of surrogate pairs replaced: JSON can spell them (`"\\ud83d"`), but no file, socket or
    tokenizer takes them."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, list):
        return [without_surrogates(item) for item in value]
    elif isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def with_compact_tools(messages: Sequence[Message], tools: Sequence[ToolSpec], call_format: str = "") -> list[Message]:
    """Describes `tools` in the system message, one short JSON line each, instead of in the model's full template.

    For small models, whose context the full template (some 200 tokens) would fill:

        {"name": "calculator", "arguments": {"expression": "string"}}

    Args:
        call_format: how to call one, for models that do not know it.
    """
    lines = []
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        named = properties.items() if isinstance(properties, Mapping) else ()
        arguments = {
            name: schema.get("type", "any") if isinstance(schema, Mapping) else "any" for name, schema in named
        }
        lines.append(json.dumps({"name": function["name"], "arguments": arguments}))
    described = "\n".join(["Tools:", *lines, *([call_format] if call_format else [])])
    if messages and messages[0]["role"] == "system":
        head = messages[0]["content"]
        return [{**messages[0], "content": f"{head}\n{described}" if head else described}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]
