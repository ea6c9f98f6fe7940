"""Tool calls as clients can read them: Python reads more as JSON than JSON is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from agentrl.record import ToolCall
from agentrl.record.messages import without_surrogates
from agentrl.session.turns import ParsedTurn


def readable(parsed: ParsedTurn) -> ParsedTurn:
    """The same turn: halves of characters in its calls are replaced, and calls with numbers that are none (`NaN`,
    `1e999`) count as malformed."""
    if not parsed.tool_calls:
        return parsed
    calls: list[ToolCall] = []
    malformed = list(parsed.invalid_tool_calls)
    for call in parsed.tool_calls:
        name, arguments = without_surrogates(call.name), without_surrogates(call.arguments)
        if _is_finite(arguments):
            calls.append(ToolCall(name, arguments, call.id))
        else:
            malformed.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return replace(parsed, tool_calls=tuple(calls), invalid_tool_calls=tuple(malformed))


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or all(map(_is_finite, value))
