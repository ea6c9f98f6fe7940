"""The real renderer and tokenizer: what a sampled turn says, and which model has which format."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from agentrl.config.schema import ModelConfig
from agentrl.record.messages import normalise_messages
from agentrl.session import ChatFormat
from agentrl.tiny import tiny_model_path
from tests.support.scripted import encode

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
USER = [{"role": "user", "content": "2 + 2?"}]


def parse(chat_format: ChatFormat, text: str) -> Any:
    prompt = chat_format.render(USER, None)
    return chat_format.parse(prompt, encode(chat_format, text))


def test_plain_text_is_plain_text(chat_format: ChatFormat) -> None:
    parsed = parse(chat_format, "It is 4.<|im_end|>")
    assert (parsed.text, parsed.reasoning, parsed.tool_calls, parsed.invalid_tool_calls) == ("It is 4.", "", (), ())


def test_reasoning_calls_and_text_are_told_apart(chat_format: ChatFormat) -> None:
    parsed = parse(chat_format, f"<think>\nhm\n</think>\n\nI compute.\n{CALL}<|im_end|>")
    assert (parsed.text, parsed.reasoning) == ("I compute.", "hm")
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments) == ("calculator", {"expression": "2 + 2"})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "write_file", "arguments": {"content": "abc',
        "<tool_call>\n",
        '<tool_call>\n{"name": "write_file", "arguments": {"content": "abc"}}',
        '<tool_call>\n{"name": "write_file", "arguments": {"content": \n</tool_call><|im_end|>',
        '<tool_call>\n{"arguments": {}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "write_file", "arguments": "abc"}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call><|im_end|>',
        "<tool_call>\n[1, 2]\n</tool_call><|im_end|>",
        "<tool_call>\nnull\n</tool_call><|im_end|>",
    ],
)
def test_a_call_that_is_cut_off_or_malformed_is_kept_as_written_and_is_no_call(
    chat_format: ChatFormat, text: str
) -> None:
    parsed = parse(chat_format, text)
    assert parsed.tool_calls == ()
    written = text.removeprefix("<tool_call>").partition("</tool_call>")[0].partition("<|im_end|>")[0]
    assert parsed.invalid_tool_calls == (written.strip(),)


def test_a_good_call_beside_a_bad_one_is_a_call(chat_format: ChatFormat) -> None:
    parsed = parse(chat_format, f'{CALL}\n<tool_call>\n{{"name": "x"')
    assert [call.name for call in parsed.tool_calls] == ["calculator"]
    assert parsed.invalid_tool_calls == ('{"name": "x"',)


@pytest.mark.parametrize(
    "arguments", ['{"expression": "2 + 2"}', {"expression": "2 + 2"}], ids=["as a string", "as an object"]
)
def test_arguments_render_as_an_object_however_a_client_sends_them(chat_format: ChatFormat, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    text = chat_format.tokenizer.decode(chat_format.render(normalise_messages(history), None))
    assert '"arguments": {"expression": "2 + 2"}}' in text
    assert "None" not in text


def test_broken_arguments_in_the_history_render_as_they_are(chat_format: ChatFormat) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"content": "abc'}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "?"}]
    text = chat_format.tokenizer.decode(chat_format.render(normalise_messages(history), None))
    assert '"arguments": {"content": "abc}' in text


def test_the_tiny_model_asks_for_compact_tools_and_the_config_can_say_otherwise() -> None:
    path = str(tiny_model_path())
    compact = ChatFormat.load(ModelConfig(path=path), path)
    full = ChatFormat.load(ModelConfig(path=path, tool_prompt="template"), path)
    compact_text = compact.tokenizer.decode(compact.render(USER, [TOOL]))
    assert json.dumps({"name": "calculator", "arguments": {"expression": "string"}}) in compact_text
    assert "# Tools" in full.tokenizer.decode(full.render(USER, [TOOL]))


def test_an_unknown_renderer_is_refused_with_the_known_ones() -> None:
    path = str(tiny_model_path())
    with pytest.raises(ValueError, match="qwen3"):
        ChatFormat.load(ModelConfig(path=path, renderer="qwen33"), path)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Any) -> None:
    with pytest.raises((OSError, ValueError)):
        ChatFormat.load(ModelConfig(path=str(tmp_path)), str(tmp_path))


def test_a_group_renders_its_first_prompt_once(chat_format: ChatFormat) -> None:
    rendered: list[Any] = []
    form = chat_format._form

    class Counting:
        stop_token_ids = form.stop_token_ids

        def render(self, messages: Any, tools: Any) -> list[int]:
            rendered.append(messages)
            return form.render(messages, tools)

    counting = ChatFormat(chat_format.tokenizer, cast(Any, Counting()))
    first = counting.render(USER, [TOOL])
    expected = list(first)
    first.append(0)
    assert counting.render(USER, [TOOL]) == expected == form.render(USER, [TOOL])
    assert len(rendered) == 1
    assert counting.render(USER, None) == form.render(USER, [])
    counting.render([{"role": "user", "content": "3 + 3?"}], [TOOL])
    assert len(rendered) == 3, "other tools or other words are another prompt"
    for number in range(200):
        counting.render([{"role": "user", "content": str(number)}])
    counting.render(USER, [TOOL])
    assert len(rendered) == 204, "what was not asked for lately is forgotten"
