"""Server-sent events, put together again as a client does."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str) -> list[tuple[str, Any]]:
    """The events of a stream: name and data. Anything that is no valid event fails."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith(":") for line in lines):
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        assert set(fields) <= {"event", "data"}, block
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def completion(text: str, count: int = 1) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The choices and the usage that the chunks of a chat completion add up to."""
    *chunks, (_, done) = parse(text)
    assert done == "[DONE]"
    choices: list[dict[str, Any]] = [{"message": {}, "finish_reason": None, "logprobs": None} for _ in range(count)]
    usage = None
    for _, chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            choice["logprobs"] = part["logprobs"] or choice["logprobs"]
            for key, value in part["delta"].items():
                if key == "tool_calls":
                    _add_calls(choice["message"].setdefault("tool_calls", []), value)
                elif key == "role":
                    choice["message"]["role"] = value
                else:
                    choice["message"][key] = choice["message"].get(key, "") + value
    return choices, usage


def _add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = delta.pop("index")
        assert index == len(calls)
        calls.append(delta)


def response(text: str) -> dict[str, Any]:
    """The last state of a response, whose items were all told piece by piece."""
    events = parse(text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    texts: dict[str, str] = {}
    done = {}
    for name, data in events:
        if name.endswith(".delta"):
            texts[data["item_id"]] = texts.get(data["item_id"], "") + data["delta"]
        elif name == "response.output_item.done":
            done[data["output_index"]] = data["item"]
    final = events[-1][1]["response"]
    assert list(done.values()) == final["output"]
    for item in final["output"]:
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[item["id"]] == whole
    return final


def message(text: str) -> dict[str, Any]:
    """An Anthropic message, from its events."""
    events = [(name, data) for name, data in parse(text) if name != "ping"]
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "message_start"
    assert events[-1][0] == "message_stop"
    result = events[0][1]["message"]
    for _, data in events[1:-1]:
        if data["type"] == "content_block_start":
            assert data["index"] == len(result["content"])
            result["content"].append(data["content_block"])
        elif data["type"] == "content_block_delta":
            _add_delta(result["content"][data["index"]], data["delta"])
        elif data["type"] == "message_delta":
            result |= data["delta"]
            result["usage"] |= data["usage"]
    return result


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind = delta["type"]
    if kind == "text_delta":
        block["text"] += delta["text"]
    elif kind == "thinking_delta":
        block["thinking"] += delta["thinking"]
    elif kind == "input_json_delta":
        block["input"] = json.loads(delta["partial_json"])
