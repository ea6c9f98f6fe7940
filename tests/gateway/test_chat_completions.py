"""OpenAI Chat Completions, as a client sees it: what is asked reaches the engine, what is said comes back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from agentrl.session import ChatFormat, SamplingLimits
from tests.support import sse
from tests.support.asynchrony import asynchronous
from tests.support.gateway import LIMITS, episode
from tests.support.scripted import (
    Sampled,
    Script,
    ScriptedEngine,
    assert_trained_as_sampled,
    encode,
    logprob,
    says,
    turns,
)

USER = {"role": "user", "content": "What is 2 + 2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def call(expression: str = "2 + 2") -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@asynchronous
async def test_a_turn_comes_back_as_a_completion(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "It is 4.")) as client:
        body = await client.chat(USER)
        (choice,) = body["choices"]
        assert choice["message"]["content"] == "It is 4."
        assert choice["finish_reason"] == "stop"
        assert (body["object"], body["model"]) == ("chat.completion", "policy")
        prompt = len(client.engine.requests[0].token_ids)
        sampled = len(says(chat_format, "It is 4.").token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        assert body["usage"] == usage


@asynchronous
async def test_a_conversation_with_tools_is_one_branch_of_exactly_the_sampled_ids(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, call(), "It is 4.")) as client:
        first = await client.chat(USER, tools=[TOOL])
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] is None
        (made,) = message["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"expression": "2 + 2"}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "4"}
        await client.chat(USER, message, result, tools=[TOOL])
        (branch,) = client.session.graph.branches()
        sampled = [says(chat_format, text).token_ids for text in (call(), "It is 4.")]
        assert_trained_as_sampled([branch], client.engine, sampled)


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(
    "text", ["It is 4.", call(), f"I look.\n{call('1')}\n{call('2')}", "<think>\nhm\n</think>\n\n4"]
)
@asynchronous
async def test_a_stream_says_and_records_the_same(chat_format: ChatFormat, text: str, usage: bool) -> None:
    """Case 34."""
    fields: dict[str, Any] = {"tools": [TOOL], "logprobs": True}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with (
        episode(chat_format, turns(chat_format, text)) as plain,
        episode(chat_format, turns(chat_format, text)) as streamed,
    ):
        whole = await plain.chat(USER, **fields)
        body = {"model": "m", "messages": [USER], **fields, "stream": True, **options}
        response = await streamed.post("/v1/chat/completions", body)
        assert response.headers["content-type"].startswith("text/event-stream")
        (choice,), told = sse.completion(response.text)
        expected = whole["choices"][0]
        message = {key: value for key, value in expected["message"].items() if value is not None}
        choice["message"] = {key: value for key, value in choice["message"].items() if value or key in message}
        assert choice["message"] == message
        assert choice["finish_reason"] == expected["finish_reason"]
        assert choice["logprobs"] == expected["logprobs"]
        assert told == (whole["usage"] if usage else None)
        (one,), (other,) = plain.session.graph.branches(), streamed.session.graph.branches()
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


@asynchronous
async def test_several_choices_are_samples_of_their_own(chat_format: ChatFormat) -> None:
    """Case 37: `n`."""
    answers = iter(["one", "two", "three"])
    async with episode(chat_format, lambda request: says(chat_format, next(answers))) as client:
        body = await client.chat(USER, n=3)
        assert sorted(choice["message"]["content"] for choice in body["choices"]) == ["one", "three", "two"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert len({request.seed for request in client.engine.requests}) == 3
        branches = client.session.graph.branches()
        sampled = [says(chat_format, text).token_ids for text in ("one", "two", "three")]
        assert_trained_as_sampled(branches, client.engine, sampled)


@pytest.mark.parametrize("form", ["developer", "parts", "null limits"])
@asynchronous
async def test_ways_of_saying_the_same(chat_format: ChatFormat, form: str) -> None:
    """Case 37."""
    system, user, fields = {"role": "system", "content": "Be brief."}, USER, {}
    plain = [system, user]
    if form == "developer":
        system = {"role": "developer", "content": "Be brief."}
    elif form == "parts":
        user = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]}
    else:
        fields = {"max_tokens": None, "max_completion_tokens": None, "stop": None, "tools": None, "n": None}
    async with episode(chat_format, turns(chat_format, "4")) as client:
        await client.chat(system, user, **fields)
        assert client.engine.requests[0].token_ids.tolist() == chat_format.render(plain)
        assert client.engine.requests[0].max_tokens == LIMITS.max_response_length


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@asynchronous
async def test_a_limit_ends_the_turn(chat_format: ChatFormat, name: str) -> None:
    async with episode(chat_format, turns(chat_format, "It is 4, I think.")) as client:
        body = await client.chat(USER, **{name: 3})
        assert client.engine.requests[0].max_tokens == 3
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["!", ["!", "?"]])
@asynchronous
async def test_a_stop_text_ends_the_turn_and_is_not_shown(chat_format: ChatFormat, stop: str | list[str]) -> None:
    sampled = Sampled(encode(chat_format, "Four! Or five?"))
    engine = ScriptedEngine(lambda request: sampled, decode=chat_format.tokenizer.decode)
    async with episode(chat_format, engine) as client:
        body = await client.chat(USER, stop=stop)
        assert body["choices"][0]["message"]["content"] == "Four"
        assert body["choices"][0]["finish_reason"] == "stop"


@asynchronous
async def test_logprobs_are_those_of_the_sampled_tokens(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "It is 4.")) as client:
        body = await client.chat(USER, logprobs=True)
        content = body["choices"][0]["logprobs"]["content"]
        ids = says(chat_format, "It is 4.").token_ids
        assert [entry["logprob"] for entry in content] == [pytest.approx(logprob(token)) for token in ids]
        assert "".join(entry["token"] for entry in content).startswith("It is 4.")
        assert content[0]["bytes"] == list(content[0]["token"].encode())


@asynchronous
async def test_reasoning_comes_apart_from_the_text(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "<think>\nEasy.\n</think>\n\n4")) as client:
        message = (await client.chat(USER))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("4", "Easy.")


@asynchronous
async def test_a_call_that_is_cut_off_is_shown_as_text_and_goes_on_in_the_same_branch(chat_format: ChatFormat) -> None:
    """Case 13: never a call, never repaired."""
    broken = call()[:40]
    cut = Sampled(encode(chat_format, broken), "length")
    answers = iter([cut, says(chat_format, "4")])
    async with episode(chat_format, lambda request: next(answers)) as client:
        choice = (await client.chat(USER, tools=[TOOL]))["choices"][0]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        assert '"name": "calculator"' in choice["message"]["content"]
        await client.chat(USER, choice["message"], {"role": "user", "content": "Go on."}, tools=[TOOL])
        (branch,) = client.session.graph.branches()
        assert len(branch.turns) == 2


@asynchronous
async def test_no_tool_is_shown_or_called_where_none_may_be(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, call())) as client:
        choice = (await client.chat(USER, tools=[TOOL], tool_choice="none"))["choices"][0]
        assert client.engine.requests[0].token_ids.tolist() == chat_format.render([USER])
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == call()
        assert "tool_calls" not in choice["message"]


@asynchronous
async def test_one_call_at_a_time(chat_format: ChatFormat) -> None:
    text = f"{call('1')}\n{call('2')}"
    engine = ScriptedEngine(turns(chat_format, text), decode=chat_format.tokenizer.decode)
    async with episode(chat_format, engine) as client:
        choice = (await client.chat(USER, tools=[TOOL], parallel_tool_calls=False))["choices"][0]
        (made,) = choice["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"expression": "1"}
        assert client.engine.requests[0].stop == ("</tool_call>",)
        (branch,) = client.session.graph.branches()
        assert branch.trained_tokens == len(encode(chat_format, call("1")))


@pytest.mark.parametrize("tools", [[TOOL], [TOOL, OTHER_TOOL]])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
@asynchronous
async def test_a_forced_call_is_sampled_by_a_schema_and_not_trained(
    chat_format: ChatFormat, tools: list[Any], choice: Any
) -> None:
    said = '{"name": "calculator", "arguments": {"expression": "2 + 2"}}'
    async with episode(chat_format, turns(chat_format, said)) as client:
        made = (await client.chat(USER, tools=tools, tool_choice=choice))["choices"][0]["message"]["tool_calls"]
        assert [c["function"]["name"] for c in made] == ["calculator"]
        (request,) = client.engine.requests
        schema = json.loads(request.json_schema)
        names = [option["properties"]["name"]["enum"] for option in schema.get("anyOf", [schema])]
        assert names == ([["calculator"], ["search"]] if len(tools) == 2 and choice == "required" else [["calculator"]])
        expected = [*chat_format.render([USER], tools), *encode(chat_format, "<tool_call>\n")]
        assert request.token_ids.tolist() == expected
        (branch,) = client.session.graph.branches()
        assert branch.trained_tokens == 0
        assert len(branch.turns) == 1


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, '{"type":"array"}'),
    ],
)
@asynchronous
async def test_a_response_format_guides_the_engine(chat_format: ChatFormat, wanted: Any, schema: str) -> None:
    async with episode(chat_format, turns(chat_format, "[4]")) as client:
        body = await client.chat(USER, response_format=wanted)
        assert body["choices"][0]["message"]["content"] == "[4]"
        assert client.engine.requests[0].json_schema == schema
        (branch,) = client.session.graph.branches()
        assert bool(branch.trained_tokens) == (schema == "")


@asynchronous
async def test_with_tools_a_schema_holds_for_what_is_said_and_not_for_calls(chat_format: ChatFormat) -> None:
    answers: list[Sampled] = [says(chat_format, text) for text in (call(), "four", "[4]")]
    script: Script = lambda request: answers.pop(0)  # noqa: E731
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    async with episode(chat_format, script) as client:
        first = (await client.chat(USER, tools=[TOOL], response_format=wanted))["choices"][0]["message"]
        assert first["tool_calls"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "4"}
        second = await client.chat(USER, first, result, tools=[TOOL], response_format=wanted)
        assert second["choices"][0]["message"]["content"] == "[4]"
        schemas = [request.json_schema for request in client.engine.requests]
        assert schemas == ["", "", '{"type":"array"}']
        trained = sum(branch.trained_tokens for branch in client.session.graph.branches())
        assert trained == len(says(chat_format, call()).token_ids)


@asynchronous
async def test_what_the_run_decides_is_named_if_a_client_asks_for_it(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
        body = {"model": "m", "messages": [USER], "temperature": 0, "top_p": 1, "seed": 3, "max_tokens": 5000}
        response = await client.post("/v1/chat/completions", {**body, "tools": [strict]})
        assert response.headers["x-agentrl-not-applied"] == "temperature, seed, max_tokens, tools.strict"
        assert client.engine.requests[0].temperature == LIMITS.temperature
        response = await client.post("/v1/chat/completions", {"model": "m", "messages": [USER], "temperature": 1})
        assert "x-agentrl-not-applied" not in response.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("frequency_penalty", 0.5),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("logit_bias", {"5": 1}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("presence_penalty", 1),
        ("reasoning_effort", "low"),
        ("top_logprobs", 3),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("guided_json", {}),
    ],
)
@asynchronous
async def test_what_is_not_supported_is_refused_by_name(chat_format: ChatFormat, field: str, value: Any) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        response = await client.post("/v1/chat/completions", {"model": "m", "messages": [USER], field: value})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field
        assert f"{field} is not supported here" in error["message"]
        assert client.engine.requests == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("messages", [], "Expected `array` of length >= 1"),
        ("messages", [{"role": "robot", "content": "x"}], "use one of system, user, assistant, tool"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text is supported"),
        ("messages", [{"role": "assistant", "tool_calls": 5}], "use a list"),
        ("messages", "hi", "Expected `array`"),
        ("n", 0, "Expected `int` >= 1"),
        ("n", 129, "Expected `int` <= 128"),
        ("max_tokens", 0, "Expected `int` >= 1"),
        ("stop", "", "use texts of at least one character"),
        ("temperature", "hot", "Expected `float"),
        ("tools", [{"type": "custom"}], "Invalid enum value 'custom'"),
        ("tool_choice", "required", "tools is empty"),
        ("tool_choice", {"type": "function", "function": {"name": "nope"}}, "'nope', which tools does not hold"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema is missing"),
    ],
)
@asynchronous
async def test_what_is_malformed_is_refused_with_the_reason(
    chat_format: ChatFormat, field: str, value: Any, said: str
) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        response = await client.post("/v1/chat/completions", {"model": "m", "messages": [USER], field: value})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        assert client.session.graph.turns == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000])
@asynchronous
async def test_what_is_no_json_is_refused(chat_format: ChatFormat, body: bytes) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        response = await client.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@asynchronous
async def test_a_prompt_that_is_too_long_is_told_in_the_clients_words(chat_format: ChatFormat) -> None:
    limits = SamplingLimits(temperature=1.0, max_prompt_length=20, max_response_length=10, max_model_len=100)
    async with episode(chat_format, turns(chat_format, "4"), limits) as client:
        response = await client.post("/v1/chat/completions", {"model": "m", "messages": [USER, USER, USER]})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert client.session.overflowed


@asynchronous
async def test_models(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        assert [model["id"] for model in (await client.http.get("/v1/models")).json()["data"]] == ["policy"]
        assert (await client.http.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"


@asynchronous
async def test_a_schema_and_stop_texts_do_not_go_together(chat_format: ChatFormat) -> None:
    limits = replace(LIMITS, stop=("!",))
    async with episode(chat_format, turns(chat_format, "{}"), limits) as client:
        wanted = {"type": "json_object"}
        body = {"model": "m", "messages": [USER], "response_format": wanted}
        assert (await client.post("/v1/chat/completions", body)).status_code == 200
        assert client.engine.requests[0].stop == (), "those of the run hold for answers in words"
        response = await client.post("/v1/chat/completions", {**body, "stop": "x"})
        assert response.status_code == 400
        assert "ends with its value" in response.json()["error"]["message"]


@asynchronous
async def test_a_forced_call_and_stop_texts_do_not_go_together(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        body = {"model": "m", "messages": [USER], "tools": [TOOL], "tool_choice": "required", "stop": "x"}
        error = (await client.post("/v1/chat/completions", body)).json()["error"]
        assert error["param"] == "stop"
        assert client.engine.requests == []


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
@asynchronous
async def test_what_is_a_number_to_python_alone_makes_no_call(chat_format: ChatFormat, number: str) -> None:
    said = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": [{number}]}}}}\n</tool_call>'
    async with episode(chat_format, turns(chat_format, said)) as client:
        choice = (await client.chat(USER, tools=[TOOL]))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        assert "calculator" in choice["message"]["content"]


@asynchronous
async def test_megabytes_are_refused_before_they_are_tokenised(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        began = asyncio.get_running_loop().time()
        body = {"model": "m", "messages": [{"role": "user", "content": "lorem ipsum dolor " * 400_000}]}
        response = await client.post("/v1/chat/completions", body)
        assert asyncio.get_running_loop().time() - began < 2
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert client.session.overflowed
