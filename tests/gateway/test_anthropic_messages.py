"""Anthropic's Messages."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.session import ChatFormat, SamplingLimits
from tests.gateway.test_chat_completions import TOOL, USER, call
from tests.support import sse
from tests.support.asynchrony import asynchronous
from tests.support.gateway import Client, episode
from tests.support.scripted import Sampled, ScriptedEngine, assert_trained_as_sampled, encode, says, turns

OWN = {
    "name": "calculator",
    "description": "Calculates.",
    "input_schema": TOOL["function"]["parameters"],
}


async def say(client: Client, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = await client.post(
        "/v1/messages", {"model": "m", "max_tokens": 100, "messages": list(messages), **fields}
    )
    assert response.status_code == 200, response.text
    return response.json()


@asynchronous
async def test_a_conversation_with_tools_is_one_branch(chat_format: ChatFormat) -> None:
    said = f"I look.\n{call('1')}\n{call('2')}"
    async with episode(chat_format, turns(chat_format, said, "It is 4.")) as client:
        first = await say(client, USER, system="Be brief.", tools=[OWN])
        assert first["stop_reason"] == "tool_use"
        text, *calls = first["content"]
        assert text == {"type": "text", "text": "I look."}
        assert [block["input"]["expression"] for block in calls] == ["1", "2"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "4"},
            {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": [{"type": "text", "text": "5"}]},
        ]
        turn = {"role": "assistant", "content": first["content"]}
        second = await say(client, USER, turn, {"role": "user", "content": results}, system="Be brief.", tools=[OWN])
        assert second["content"] == [{"type": "text", "text": "It is 4."}]
        assert second["stop_reason"] == "end_turn"
        (branch,) = client.session.graph.branches()
        sampled = [says(chat_format, text).token_ids for text in (said, "It is 4.")]
        assert_trained_as_sampled([branch], client.engine, sampled)
        expected = chat_format.render([{"role": "system", "content": "Be brief."}, USER], [TOOL])
        assert client.engine.requests[0].token_ids.tolist() == expected


@pytest.mark.parametrize("text", ["It is 4.", f"I look.\n{call('1')}\n{call('2')}", "<think>\nhm\n</think>\n\n4"])
@asynchronous
async def test_a_stream_says_and_records_the_same(chat_format: ChatFormat, text: str) -> None:
    """Case 34."""
    async with (
        episode(chat_format, turns(chat_format, text)) as plain,
        episode(chat_format, turns(chat_format, text)) as streamed,
    ):
        whole = await say(plain, USER, tools=[OWN])
        body = {"model": "m", "max_tokens": 100, "messages": [USER], "tools": [OWN], "stream": True}
        told = sse.message((await streamed.post("/v1/messages", body)).text)
        assert {**told, "id": ""} == {**whole, "id": ""}
        (one,), (other,) = plain.session.graph.branches(), streamed.session.graph.branches()
        assert one.token_ids.tolist() == other.token_ids.tolist()


@asynchronous
async def test_the_base_url_of_the_policy_serves_its_clients_too(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        path = f"{client.session.base_url}/v1/messages"
        key = {"x-api-key": client.session.api_key, "Authorization": ""}
        response = await client.http.post(path, json={"model": "m", "max_tokens": 5, "messages": [USER]}, headers=key)
        assert response.status_code == 200


@asynchronous
async def test_how_a_turn_ended(chat_format: ChatFormat) -> None:
    sampled = Sampled(encode(chat_format, "Four! Or five?"))
    engine = ScriptedEngine(lambda request: sampled, decode=chat_format.tokenizer.decode)
    async with episode(chat_format, engine) as client:
        body = await say(client, USER, stop_sequences=["?", "!"])
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "!")
        assert body["content"][0]["text"] == "Four"
        body = await say(client, USER, max_tokens=2)
        assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 2)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "calculator"}])
@asynchronous
async def test_a_forced_call(chat_format: ChatFormat, choice: dict[str, str]) -> None:
    said = '{"name": "calculator", "arguments": {"expression": "2"}}'
    async with episode(chat_format, turns(chat_format, said)) as client:
        body = await say(client, USER, tools=[OWN], tool_choice=choice)
        assert body["content"][0]["input"] == {"expression": "2"}
        assert client.engine.requests[0].json_schema


@asynchronous
async def test_tokens_are_counted_without_asking_the_engine(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        body = {"model": "m", "messages": [USER], "system": [{"type": "text", "text": "Be brief."}], "tools": [OWN]}
        counted = (await client.post("/v1/messages/count_tokens", body)).json()
        expected = chat_format.render([{"role": "system", "content": "Be brief."}, USER], [TOOL])
        assert counted == {"input_tokens": len(expected)}
        assert client.engine.requests == []


@asynchronous
async def test_errors_have_its_form(chat_format: ChatFormat) -> None:
    limits = SamplingLimits(temperature=1.0, max_prompt_length=20, max_response_length=10, max_model_len=100)
    async with episode(chat_format, turns(chat_format, "4"), limits) as client:
        body = {"model": "m", "max_tokens": 5, "messages": [USER] * 5}
        response = await client.post("/v1/messages", body)
        error = response.json()
        assert (response.status_code, error["type"]) == (400, "error")
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith("prompt is too long")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of type 'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "use user or assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, "use a string or a list of blocks"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "an answer that the client has begun"),
        ({"tools": [{**OWN, "input_examples": [{}]}]}, "put them into the description"),
        ({"container": "x"}, "container is not supported"),
        ({"betas": ["x"]}, "betas is not supported"),
    ],
)
@asynchronous
async def test_what_can_not_be_done_is_refused(chat_format: ChatFormat, fields: dict[str, Any], said: str) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        body = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
        response = await client.post("/v1/messages", body)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        assert client.engine.requests == []


@pytest.mark.parametrize("content", ["no such file", [{"type": "text", "text": "no such file"}], "", None])
@asynchronous
async def test_the_policy_sees_that_a_tool_failed(chat_format: ChatFormat, content: Any) -> None:
    async with episode(chat_format, turns(chat_format, call(), "4")) as client:
        first = await say(client, USER, tools=[OWN])
        result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": content, "is_error": True}
        turn = {"role": "assistant", "content": first["content"]}
        await say(client, USER, turn, {"role": "user", "content": [result]}, tools=[OWN])
        prompt = chat_format.tokenizer.decode(client.engine.requests[1].token_ids.tolist())
        assert "Error: " + ("no such file" if content else "") in prompt


@asynchronous
async def test_blocks_of_the_system_prompt_are_lines(chat_format: ChatFormat) -> None:
    system = [{"type": "text", "text": text} for text in ("You are brief.", "You use tools.")]
    async with episode(chat_format, turns(chat_format, "4")) as client:
        await say(client, USER, system=system)
        expected = chat_format.render([{"role": "system", "content": "You are brief.\nYou use tools."}, USER])
        assert client.engine.requests[0].token_ids.tolist() == expected
