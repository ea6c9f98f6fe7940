"""Messages as clients really send them become the one form that templates can render (cases 15 and 37)."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.record import MessageError, Reply, ToolCall
from agentrl.record.messages import normalise_messages, with_compact_tools


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "search", "arguments": arguments}}


def assistant(*calls: Any, content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"query": "x"}', {"query": "x"}),
        ({"query": "x"}, {"query": "x"}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ('{"query": "x', '{"query": "x'),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ("3", "3"),
    ],
)
def test_arguments_become_an_object_where_they_are_one_and_stay_what_they_were_else(sent: Any, arguments: Any) -> None:
    (message,) = normalise_messages([assistant(call(sent))])
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": arguments}


def test_a_call_without_arguments_has_none() -> None:
    (message,) = normalise_messages([assistant({"id": "c1", "function": {"name": "now"}})])
    assert message["tool_calls"][0] == {"type": "function", "id": "c1", "function": {"name": "now", "arguments": {}}}


def test_null_content_beside_tool_calls_is_empty_text() -> None:
    (message,) = normalise_messages([assistant(call("{}"), content=None)])
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "input_text", "text": "in"}, {"type": "output_text", "text": "out"}], "inout"),
        (["a", "b"], "ab"),
        ([], ""),
        (None, ""),
    ],
)
def test_text_parts_are_joined(content: Any, text: str) -> None:
    assert normalise_messages([{"role": "user", "content": content}])[0]["content"] == text


def test_a_developer_is_a_system() -> None:
    assert normalise_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_what_templates_know_is_kept_and_the_rest_is_left_out() -> None:
    message = {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "search", "refusal": None, "audio": 1}
    assert normalise_messages([message]) == [{"role": "tool", "content": "42", "tool_call_id": "c1", "name": "search"}]


def test_reasoning_is_kept() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    assert normalise_messages([message])[0]["reasoning_content"] == "2 + 2"


def test_the_sender_keeps_its_own_messages() -> None:
    sent = [assistant(call('{"a": 1}'))]
    normalise_messages(sent)[0]["tool_calls"][0]["function"]["name"] = "changed"
    assert sent == [assistant(call('{"a": 1}'))]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"role": "user", "content": "a"}, {"role": "robot"}], r"messages\[1\]\.role is 'robot'"),
        ([{"content": "a"}], r"messages\[0\]\.role is None"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [None]}], "only text"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is 3"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([assistant("search")], r"messages\[0\]\.tool_calls holds 'search'"),
    ],
)
def test_what_no_template_can_render_is_refused_with_its_place(messages: Any, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        normalise_messages(messages)


def test_a_reply_goes_back_into_the_history_as_it_is() -> None:
    reply = Reply("text", "thought", (ToolCall("search", {"query": "x"}, "c1"),), "tool_calls", 0)
    (message,) = normalise_messages([reply.message])
    assert message == {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "thought",
        "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "search", "arguments": {"query": "x"}}}],
    }


TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"properties": {"query": {"type": "string"}, "deep": {}}}},
}
LINE = '{"name": "search", "arguments": {"query": "string", "deep": "any"}}'


@pytest.mark.parametrize(
    ("messages", "system"),
    [
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}], f"Be brief.\nTools:\n{LINE}"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": "x"}], f"Tools:\n{LINE}"),
        ([{"role": "user", "content": "x"}], f"Tools:\n{LINE}"),
    ],
)
def test_compact_tools_are_one_line_each_in_the_system_message(messages: Any, system: str) -> None:
    described = with_compact_tools(messages, [TOOL])
    assert described == [{"role": "system", "content": system}, {"role": "user", "content": "x"}]


def test_compact_tools_leave_the_given_messages_alone() -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    with_compact_tools(messages, [TOOL])
    assert messages == [{"role": "system", "content": "Be brief."}]


def test_a_tool_without_parameters_has_no_arguments() -> None:
    (message,) = with_compact_tools([], [{"type": "function", "function": {"name": "now"}}])
    assert message["content"] == 'Tools:\n{"name": "now", "arguments": {}}'


def test_compact_tools_can_say_how_to_call_one() -> None:
    (message,) = with_compact_tools([], [TOOL], "To call one, write a line.")
    assert message["content"] == f"Tools:\n{LINE}\nTo call one, write a line."


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": None}])
def test_a_tool_may_have_any_form_of_no_arguments(parameters: Any) -> None:
    (message,) = with_compact_tools([], [{"type": "function", "function": {"name": "now", "parameters": parameters}}])
    assert message["content"] == 'Tools:\n{"name": "now", "arguments": {}}'
