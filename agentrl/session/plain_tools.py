"""Tool use for chat templates that know none: as plain text, in the form that Hermes and Qwen use.

Such a template would leave tools, calls or results out without a word, and the model would never see them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.record import Message

CALL_FORMAT = (
    'To call a tool, write:\n<tool_call>\n{"name": <name of the tool>, "arguments": <JSON object>}\n</tool_call>'
)
"""What a model that was not trained to call tools is told."""


def with_plain_calls(messages: Sequence[Message]) -> list[Message]:
    """Writes tool calls into the text of their turns, and their results into user messages."""
    result: list[Message] = []
    from_tools = False
    for message in messages:
        if message["role"] == "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            if from_tools:
                result[-1] = {"role": "user", "content": f"{result[-1]['content']}\n{content}"}
            else:
                result.append({"role": "user", "content": content})
            from_tools = True
            continue
        if from_tools and message["role"] == "user":
            # Two user messages in a row, one of which the user did not write, is what many templates refuse.
            result[-1] = {"role": "user", "content": f"{result[-1]['content']}\n{message['content']}"}
        elif message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            parts = [message["content"], *map(_written, message["tool_calls"])]
            result.append({**kept, "content": "\n".join(part for part in parts if part)})
        else:
            result.append(message)
        from_tools = False
    return result


def in_first_user_message(messages: Sequence[Message]) -> list[Message]:
    """The same, for templates without a place for a system message: it goes before what the user says first."""
    if messages[0]["role"] != "system":
        return list(messages)
    head, *rest = messages
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = {**message, "content": f"{head['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": head["content"]}, *rest]


def _written(call: Message) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'
