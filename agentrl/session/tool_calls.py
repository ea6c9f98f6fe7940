"""Tool calls in the text of a turn, by the syntax of the model's family.

For models whose chat template is all that is known of them. The package `renderers` has parsers of its own, but they
need the marks to be tokens of the vocabulary, and take every value without quotes for broken JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.record import ToolCall, ToolSpec

Found = ToolCall | str
"""A complete call, or the text of one that is cut off or malformed."""
Syntax = Callable[[str, Sequence[ToolSpec]], tuple[str, list[Found]]]
"""Splits a turn into what it says and its calls."""


def syntax_of(template: str) -> Syntax:
    """The syntax that a chat template uses; without any sign of one, that of Hermes and Qwen."""
    for marks, syntax in _SIGNS:
        if all(mark in template for mark in marks):
            return syntax
    return hermes


def hermes(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3."""
    return _blocks(text, "<tool_call>", "</tool_call>", _json_call)


def functions(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen 3.5, Qwen 3 Coder."""

    def call(block: str) -> Found:
        match = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", block, re.DOTALL)
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL) if match else []
        if match is None or match[2].count("<parameter=") != len(pairs):
            return block.strip()
        return ToolCall(match[1], _typed(match[1], pairs, tools))

    return _blocks(text, "<tool_call>", "</tool_call>", call)


def arg_keys(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

    def call(block: str) -> Found:
        name, mark, rest = block.partition("<arg_key>")
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", mark + rest, re.DOTALL)
        if not re.fullmatch(r"[\w.:-]+", name.strip()) or rest.count("<arg_value>") != len(pairs):
            return block.strip()
        return ToolCall(name.strip(), _typed(name.strip(), pairs, tools))

    return _blocks(text, "<tool_call>", "</tool_call>", call)


def mistral(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or with newer models `[TOOL_CALLS]name[ARGS]{...}`."""
    said, *sections = text.split("[TOOL_CALLS]")
    found: list[Found] = []
    for section in sections:
        name, mark, arguments = section.partition("[ARGS]")
        if mark:
            value = _json(arguments)
            found.append(ToolCall(name.strip(), value) if isinstance(value, dict) else section.strip())
        else:
            found += _json_calls(section)
    return said.strip(), found


def deepseek(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """DeepSeek V3 and R1: a type, a separator, the name and fenced JSON. V3.1: the name, a separator and JSON."""

    def call(block: str) -> Found:
        left, _, right = block.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*", right, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (left.strip(), right)
        value = _json(arguments)
        return ToolCall(name, value) if name and isinstance(value, dict) else block.strip()

    said, found = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", call)
    return said.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "").strip(), found


def listed(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`: Phi 4 mini; Granite leaves the end mark out."""
    said, *sections = text.split("<|tool_call|>")
    found = [call for section in sections for call in _json_calls(section.partition("<|/tool_call|>")[0])]
    return said.strip(), found


def bare_json(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[Found]]:
    """`{"name": ..., "parameters": {...}}` and nothing else: Llama 3. Without tools it is an answer that is JSON."""
    body = text.removeprefix("<|python_tag|>").strip()
    if not tools or not re.match(r'\{\s*"(name|type|function)"', body):
        return text.strip(), []
    return "", [_json_call(body)]


_SIGNS: tuple[tuple[tuple[str, ...], Syntax], ...] = (
    (("<tool_call>", "<arg_key>"), arg_keys),
    (("<tool_call>", "<function="), functions),
    (("<tool_call>",), hermes),
    (("[TOOL_CALLS]",), mistral),
    (("<｜tool▁call▁begin｜>",), deepseek),
    (("<|tool_call|>",), listed),
    (("<|start_header_id|>", "parameters"), bare_json),
)


def _blocks(text: str, start: str, end: str, call: Callable[[str], Found]) -> tuple[str, list[Found]]:
    """Reads the blocks between two marks; a block without its end mark is cut off."""
    said, *sections = text.split(start)
    found: list[Found] = []
    for section in sections:
        block, mark, after = section.partition(end)
        found.append(call(block) if mark else block.strip())
        said += after if after.strip() else ""
    return said.strip(), found


def _json(text: str) -> Any:
    """A JSON value; None for what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _json_call(text: str) -> Found:
    return _call(_json(text)) or text.strip()


def _json_calls(text: str) -> list[Found]:
    """The calls of a JSON list (or of a single call); as a whole cut off or malformed if any of them is."""
    value = _json(text)
    calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
    complete = [call for call in calls if call is not None]
    return [*complete] if len(complete) == len(calls) else [text.strip()]


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    given = value.get("id")
    return ToolCall(name, arguments, given if isinstance(given, str) else "")


def _typed(name: str, pairs: list[tuple[str, str]], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Values written without quotes: text where the tool declares text, else JSON where they are JSON."""
    specs = [tool.get("function", tool) for tool in tools]
    parameters = next((spec.get("parameters") or {} for spec in specs if spec.get("name") == name), {})
    declared = parameters.get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, written in pairs:
        schema = declared.get(key.strip()) or {}
        value = None if schema.get("type") == "string" else _json(written)
        arguments[key.strip()] = written.strip() if value is None and written.strip() != "null" else value
    return arguments
