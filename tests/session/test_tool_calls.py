"""Tool calls in the syntax of each family: complete ones are calls, all others stay text that nobody executes."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.record import ToolCall
from agentrl.session import tool_calls
from agentrl.session.tool_calls import syntax_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {}}},
        },
    }
]
DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
WHOLE = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>', {"a": "x"}),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', {}),
    ("functions", "<tool_call>\n<function=add>\n</function>\n</tool_call>", {}),
    (
        "functions",
        "<tool_call><function=add><parameter=a>\ntrue\n</parameter><parameter=n>3</parameter>"
        "<parameter=b>no json</parameter></function></tool_call>",
        {"a": "true", "n": 3, "b": "no json"},
    ),
    ("arg_keys", "<tool_call>add</tool_call>", {}),
    (
        "arg_keys",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>[1]</arg_value>"
        "</tool_call>",
        {"a": "1", "b": [1]},
    ),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "x"}}]', {"a": "x"}),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "x"}', {"a": "x"}),
    ("deepseek", DEEPSEEK.format("function", 'add\n```json\n{"a": "x"}\n```'), {"a": "x"}),
    ("deepseek", DEEPSEEK.format("add", '{"a": "x"}'), {"a": "x"}),
    ("listed", '<|tool_call|>[{"name": "add", "arguments": {"a": "x"}}]<|/tool_call|>', {"a": "x"}),
    ("listed", '<|tool_call|>[{"name": "add", "arguments": {"a": "x"}}]', {"a": "x"}),
    ("bare_json", '{"name": "add", "parameters": {"a": "x"}}', {"a": "x"}),
    ("bare_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "x"}}', {"a": "x"}),
]


@pytest.mark.parametrize(("syntax", "text", "arguments"), WHOLE)
def test_a_complete_call_is_a_call(syntax: str, text: str, arguments: dict[str, Any]) -> None:
    assert getattr(tool_calls, syntax)(text, TOOLS) == ("", [ToolCall("add", arguments)])


@pytest.mark.parametrize(("syntax", "text"), [(syntax, text) for syntax, text, _ in WHOLE])
def test_a_call_cut_anywhere_is_never_another_call(syntax: str, text: str) -> None:
    """Case 13: whatever is left of it, the call that was meant or none."""
    _, (meant,) = getattr(tool_calls, syntax)(text, TOOLS)
    for end in range(len(text)):
        _, found = getattr(tool_calls, syntax)(text[:end], TOOLS)
        assert all(isinstance(call, str) or call == meant for call in found)


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("functions", "<tool_call>add</tool_call>"),
        ("functions", "<tool_call><function=add><parameter=a>x</function></tool_call>"),
        ("arg_keys", "<tool_call>add now <arg_key>a</arg_key></tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": 3}]'),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("deepseek", DEEPSEEK.format("add", "{")),
        ("bare_json", '{"name": "add", "parameters": {"a": "x"'),
    ],
)
def test_a_malformed_call_is_kept_as_written(syntax: str, text: str) -> None:
    _, found = getattr(tool_calls, syntax)(text, TOOLS)
    (raw,) = found
    assert isinstance(raw, str) and raw in text and raw


@pytest.mark.parametrize("syntax", ["hermes", "mistral", "deepseek", "listed", "functions", "arg_keys", "bare_json"])
@pytest.mark.parametrize("text", ["It is 4.", "", '{"answer": 4}', "a < b", "[1, 2]"])
def test_text_without_a_call_is_text(syntax: str, text: str) -> None:
    assert getattr(tool_calls, syntax)(text, TOOLS) == (text, [])


def test_an_answer_in_json_is_no_call_where_there_are_no_tools() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert tool_calls.bare_json(text, []) == (text, [])


def test_what_is_said_around_calls_is_kept() -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    assert tool_calls.hermes(f"First.\n{call}\n{call}", TOOLS)[0] == "First."
    assert tool_calls.hermes(f"First.{call} Then.", TOOLS)[0] == "First. Then."


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("<tool_call>\n{", "hermes"),
        ("<tool_call><function=", "functions"),
        ("<tool_call> <arg_key>", "arg_keys"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|tool_call|>", "listed"),
        ('<|start_header_id|> "parameters"', "bare_json"),
        ("", "hermes"),
    ],
)
def test_the_syntax_is_read_from_the_template(template: str, syntax: str) -> None:
    assert syntax_of(template) is getattr(tool_calls, syntax)
