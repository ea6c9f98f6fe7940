"""Turns that must be a tool call: how models of each family write one, and the schema of what is sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.record import MessageError, ToolCall
from agentrl.session import ChatCall, ChatFormat, Session
from agentrl.session.forced_calls import CallFrame
from tests.session import test_families, test_templates
from tests.session.test_session import LIMITS, USER
from tests.support.asynchrony import asynchronous
from tests.support.scripted import ScriptedEngine, says
from tests.support.templates import FAMILIES

ARGUMENTS = {"sum": "2 + 2"}
TOOLS = test_templates.TOOLS
NO_JSON = {"glm"}
PACKAGED = ["deepseek-v3", "llama-3", "qwen3", "qwen3-vl"]
NOT_PACKAGED = ["deepseek-r1", "glm-4.5", "minimax-m2", "qwen3.5"]
"""Families that write arguments as marked text, or write no calls."""


def forms() -> list[Any]:
    own = [pytest.param(test_templates.form, name, id=f"template-{name}") for name in FAMILIES if name not in NO_JSON]
    return [*own, *(pytest.param(test_families.form, name, id=name) for name in PACKAGED)]


@pytest.mark.parametrize(("form", "name"), forms())
def test_a_call_in_its_frame_is_what_the_family_reads_as_a_call(form: Any, name: str) -> None:
    chat_format: ChatFormat = form(name)
    frame = chat_format.call_frame
    assert frame is not None
    value = {frame.name_key: "add", frame.arguments_key: ARGUMENTS} if frame.name_key else ARGUMENTS
    end = frame.after.partition("</tool_call>")
    written = frame.start("add") + json.dumps(value) + end[0] + end[1]
    parsed = chat_format.parse(chat_format.render([USER], TOOLS), chat_format.encode(written), TOOLS)
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments, parsed.text) == ("add", ARGUMENTS, "")
    assert frame.read(json.dumps(value), "add") == ToolCall("add", ARGUMENTS)


@pytest.mark.parametrize("name", NOT_PACKAGED)
@asynchronous
async def test_a_family_that_writes_no_json_can_not_be_forced(name: str) -> None:
    chat_format = test_families.form(name)
    assert chat_format.call_frame is None
    policy = Session("e", chat_format, ScriptedEngine(says), LIMITS)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="does not write tool calls as JSON"):
        await policy.answer(ChatCall([USER], TOOLS, tool_choice="required"))


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FRAME = CallFrame("<", ">", "name", "arguments")
ONE_ARGUMENT = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
OTHER = {**ONE_ARGUMENT, "$defs": {"X": {"type": "array", "items": {"$ref": "#/$defs/Y"}}, "Y": {"type": "null"}}}


def test_definitions_of_several_tools_do_not_meet() -> None:
    schema = json.loads(FRAME.schema([tool("a", ONE_ARGUMENT), tool("b", OTHER)]))
    assert schema["$defs"] == {
        "tool0_X": {"type": "integer"},
        "tool1_X": {"type": "array", "items": {"$ref": "#/$defs/tool1_Y"}},
        "tool1_Y": {"type": "null"},
    }
    references = [option["properties"]["arguments"]["properties"]["x"]["$ref"] for option in schema["anyOf"]]
    assert references == ["#/$defs/tool0_X", "#/$defs/tool1_X"]
    assert all("$defs" not in option["properties"]["arguments"] for option in schema["anyOf"])


def test_old_definitions_are_moved_too() -> None:
    old = {"properties": {"x": {"$ref": "#/definitions/X"}}, "definitions": {"X": {"type": "integer"}}}
    schema = json.loads(FRAME.schema([tool("a", old)]))
    assert schema["properties"]["arguments"] == {"properties": {"x": {"$ref": "#/$defs/tool0_X"}}}
    assert schema["$defs"] == {"tool0_X": {"type": "integer"}}


@pytest.mark.parametrize("ref", ["#", "#/properties/value"])
def test_parameters_that_refer_to_themselves_still_do(ref: str) -> None:
    parameters = {"type": "object", "properties": {"value": {"type": "integer"}, "other": {"$ref": ref}}}
    schema = json.loads(FRAME.schema([tool("a", parameters)]))
    assert schema["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}
    assert schema["$defs"]["tool0"]["properties"]["other"] == {"$ref": f"#/$defs/tool0{ref[1:]}"}


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_definitions_that_are_none_are_refused(key: str) -> None:
    with pytest.raises(MessageError, match="use an object"):
        FRAME.schema([tool("a", {key: [1]})])


def test_where_only_arguments_are_json_one_tool_can_be_forced() -> None:
    frame = CallFrame("call {name} with ", "")
    assert json.loads(frame.schema([tool("a", {"type": "object"})])) == {"type": "object"}
    assert frame.start("a") == "call a with "
    assert frame.read('{"x": 1}', "a") == ToolCall("a", {"x": 1})
    with pytest.raises(MessageError, match="only a tool that is named"):
        frame.schema([tool("a", {}), tool("b", {})])


@pytest.mark.parametrize(
    "written", ["", "{", "[]", "7", '{"name": "a"', '{"name": "a"}', '{"name": 1, "arguments": {}}']
)
def test_what_is_no_whole_call_is_none(written: str) -> None:
    assert FRAME.read(written, "a") is None


@pytest.mark.parametrize(
    "written", ["", "call it", "qztool", '{"qzarg": "qzcall"}', '{"qzarg": "qzcall"} qztool', "{{{"]
)
def test_what_shows_no_call_has_no_frame(written: str) -> None:
    assert CallFrame.found_in(written) is None
