"""Random conversations, replayed through the gateway: they come back as their branches, each turn trained once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.session import ChatFormat
from tests.gateway.test_chat_completions import TOOL, call
from tests.support import sse
from tests.support.gateway import episode
from tests.support.scripted import Sampled, ScriptedEngine, assert_trained_as_sampled, encode, logprob

APIS = ("chat", "responses", "messages")


steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # which history to go on from; beyond them: a new conversation
        st.sampled_from(["go on", "again", "what", "2 + 2?"]),  # what the user says
        st.sampled_from(["yes", "no", "It is 4.", f"Look.\n{call('1 + 1')}", call("7")]),  # what the model says
        st.sampled_from(APIS),
        st.booleans(),  # streamed
    ),
    min_size=1,
    max_size=12,
)


@given(steps=steps)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conversations_come_back_as_their_branches(chat_format: ChatFormat, steps: list[Any]) -> None:
    asyncio.run(_replay(chat_format, steps))


async def _replay(chat_format: ChatFormat, steps: list[Any]) -> None:
    answers = [[*encode(chat_format, said), chat_format.stop_token_ids[0]] for _, _, said, _, _ in steps]
    engine = ScriptedEngine(_in_order(answers))
    async with episode(chat_format, engine) as client:
        known: list[list[dict[str, Any]]] = []
        paths: list[list[int]] = []
        for start, asks, _, api, stream in steps:
            goes_on = start < len(known)
            history = [*known[start]] if goes_on else [{"role": "system", "content": "You answer."}]
            before = paths[start] if goes_on else []
            history += _after(history, asks)
            message = await _ask(client, api, history, stream)
            request = engine.requests[-1].token_ids.tolist()
            assert request[: len(before)] == before, "the prompt does not go on from the tokens of the turn before"
            paths.append([*request, *answers[len(known)]])
            known.append([*history, message])
        branches = client.session.graph.branches()
    assert_trained_as_sampled(branches, engine, answers)
    # A turn that was sampled twice, word by word, is two turns, of which the one that came first is gone on from.
    leaves = Counter(map(tuple, paths))
    for path in list(leaves):
        leaves[path] -= any(len(other) > len(path) and other[: len(path)] == path for other in leaves)
    assert Counter(tuple(branch.token_ids.tolist()) for branch in branches) == +leaves
    trained = sum(branch.trained_tokens for branch in branches)
    assert trained == sum(map(len, answers))
    for branch in branches:
        ids, mask = branch.token_ids, branch.loss_mask == 1
        assert branch.logprobs[mask].tolist() == [logprob(token) for token in ids[mask].tolist()]
        assert (branch.versions[mask] == 0).all()
        assert (branch.versions[~mask] == -1).all()


def _in_order(answers: list[list[int]]) -> Any:
    left = iter(answers)
    return lambda request: Sampled(next(left))


def _after(history: list[dict[str, Any]], asks: str) -> list[dict[str, Any]]:
    calls = history[-1].get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": made["id"], "content": "42"} for made in calls]
    return results or [{"role": "user", "content": asks}]


async def _ask(client: Any, api: str, history: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    """Asks in one of the APIs; the answer is a chat message whichever it was."""
    if api == "chat":
        body: dict[str, Any] = {"model": "m", "messages": history, "tools": [TOOL], "stream": stream}
        response = await client.post("/v1/chat/completions", body)
        choice = sse.completion(response.text)[0][0] if stream else response.json()["choices"][0]
        return choice["message"]
    if api == "responses":
        tools = [{"type": "function", **TOOL["function"]}]
        body = {"model": "m", "input": _items(history), "tools": tools, "stream": stream}
        response = await client.post("/v1/responses", body)
        final = sse.response(response.text) if stream else response.json()
        return _of_items(final["output"])
    system, *rest = history
    function = TOOL["function"]
    tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
    body = {"model": "m", "max_tokens": 200, "system": system["content"], "messages": _blocks(rest), "tools": tools}
    response = await client.post("/v1/messages", {**body, "stream": stream})
    final = sse.message(response.text) if stream else response.json()
    return _of_blocks(final["content"])


def _items(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("content"):
            items.append({"role": message["role"], "content": message["content"]})
        for made in message.get("tool_calls", ()):
            function = made["function"]
            items.append({"type": "function_call", "call_id": made["id"], **function})
    return items


def _of_items(items: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for item in items:
        if item["type"] == "message":
            message["content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            made = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(made)
    return message


def _blocks(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            messages.append({"role": "user", "content": [result]})
        elif message["role"] == "assistant":
            blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}] if message["content"] else []
            for made in message.get("tool_calls", ()):
                function = made["function"]
                given = json.loads(function["arguments"])
                blocks.append({"type": "tool_use", "id": made["id"], "name": function["name"], "input": given})
            messages.append({"role": "assistant", "content": blocks})
        else:
            messages.append({"role": "user", "content": message["content"]})
    return messages


def _of_blocks(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for block in blocks:
        if block["type"] == "text":
            message["content"] = block["text"]
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            made = {"id": block["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(made)
    return message
