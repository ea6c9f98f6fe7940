"""OpenAI Responses, as the Agents SDK speaks it first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.session import ChatFormat
from tests.gateway.test_chat_completions import TOOL, USER, call
from tests.support import sse
from tests.support.asynchrony import asynchronous
from tests.support.gateway import Client, episode
from tests.support.scripted import Sampled, assert_trained_as_sampled, encode, says, turns

FUNCTION = {"type": "function", **TOOL["function"]}


async def respond(client: Client, given: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", {"model": "m", "input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@asynchronous
async def test_a_turn_is_a_message(chat_format: ChatFormat) -> None:
    """Case 37."""
    async with episode(chat_format, turns(chat_format, "It is 4.")) as client:
        body = await respond(client, "What is 2 + 2?", instructions="Be brief.", max_output_tokens=20)
        (item,) = body["output"]
        assert item["content"][0]["text"] == "It is 4."
        assert (item["type"], item["role"], body["status"]) == ("message", "assistant", "completed")
        (request,) = client.engine.requests
        expected = chat_format.render([{"role": "system", "content": "Be brief."}, USER])
        assert (request.token_ids.tolist(), request.max_tokens) == (expected, 20)
        assert body["usage"]["input_tokens"] == len(expected)


@pytest.mark.parametrize("remembered", [True, False])
@asynchronous
async def test_a_conversation_with_tools_is_one_branch(chat_format: ChatFormat, remembered: bool) -> None:
    """The client sends all items back, or only what is new after `previous_response_id`."""
    said = f"I look.\n{call('1')}\n{call('2')}"
    async with episode(chat_format, turns(chat_format, said, "It is 4.")) as client:
        first = await respond(client, [USER], tools=[FUNCTION])
        text, *calls = first["output"]
        assert (text["type"], [c["type"] for c in calls]) == ("message", ["function_call", "function_call"])
        assert [json.loads(c["arguments"])["expression"] for c in calls] == ["1", "2"]
        results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "4"} for c in calls]
        if remembered:
            second = await respond(client, results, tools=[FUNCTION], previous_response_id=first["id"])
        else:
            second = await respond(client, [USER, *first["output"], *results], tools=[FUNCTION])
        assert second["output"][0]["content"][0]["text"] == "It is 4."
        (branch,) = client.session.graph.branches()
        sampled = [says(chat_format, text).token_ids for text in (said, "It is 4.")]
        assert_trained_as_sampled([branch], client.engine, sampled)


@pytest.mark.parametrize("text", ["It is 4.", f"I look.\n{call('1')}\n{call('2')}", "<think>\nhm\n</think>\n\n4"])
@asynchronous
async def test_a_stream_says_and_records_the_same(chat_format: ChatFormat, text: str) -> None:
    """Case 34."""
    async with (
        episode(chat_format, turns(chat_format, text)) as plain,
        episode(chat_format, turns(chat_format, text)) as streamed,
    ):
        whole = await respond(plain, [USER], tools=[FUNCTION])
        body = {"model": "m", "input": [USER], "tools": [FUNCTION], "stream": True}
        final = sse.response((await streamed.post("/v1/responses", body)).text)
        assert _without_ids(final) == _without_ids(whole)
        (one,), (other,) = plain.session.graph.branches(), streamed.session.graph.branches()
        assert one.token_ids.tolist() == other.token_ids.tolist()


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    return {**{key: value for key, value in response.items() if key not in ("id", "created_at")}, "output": items}


@asynchronous
async def test_a_turn_that_is_cut_off_is_incomplete(chat_format: ChatFormat) -> None:
    async with episode(chat_format, lambda request: Sampled(encode(chat_format, "It is"), "length")) as client:
        body = await respond(client, "hi")
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        streamed = await client.post("/v1/responses", {"model": "m", "input": "hi", "stream": True})
        assert sse.response(streamed.text)["status"] == "incomplete"


@asynchronous
async def test_reasoning_is_an_item_and_may_come_back(chat_format: ChatFormat) -> None:
    said = f"<think>\nEasy.\n</think>\n\n{call()}"
    async with episode(chat_format, turns(chat_format, said, "4")) as client:
        first = await respond(client, [USER], tools=[FUNCTION])
        thought, made = first["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Easy."}]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "4"}
        for items in ([thought, made], [made]):
            await respond(client, [USER, *items, result], tools=[FUNCTION])
        first_prompt, *others = [request.token_ids.tolist() for request in client.engine.requests]
        kept = [*first_prompt, *says(chat_format, said).token_ids]
        assert all(prompt[: len(kept)] == kept for prompt in others)


@asynchronous
async def test_a_schema_and_logprobs(chat_format: ChatFormat) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "array"}, "strict": True}
    async with episode(chat_format, turns(chat_format, "[4]")) as client:
        body = await respond(client, "hi", text={"format": form}, include=["message.output_text.logprobs"])
        assert client.engine.requests[0].json_schema == '{"type":"array"}'
        content = body["output"][0]["content"][0]
        assert content["text"] == "[4]"
        assert len(content["logprobs"]) == body["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "type 'web_search'"),
        ({"background": True}, "background is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"previous_response_id": "resp_1"}, "no response 'resp_1'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' can't be shown"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text is supported"),
        ({"input": [{"type": "reasoning", "summary": True}]}, "summary of a reasoning item is True: use a list"),
        ({"input": []}, "messages is empty"),
        ({"include": ["file_search_call.results"]}, "include is not supported"),
        ({"max_output_tokens": 0}, "Expected `int` >= 1"),
    ],
)
@asynchronous
async def test_what_can_not_be_done_is_refused(chat_format: ChatFormat, fields: dict[str, Any], said: str) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        response = await client.post("/v1/responses", {"model": "m", "input": "hi", **fields})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        assert client.engine.requests == []
