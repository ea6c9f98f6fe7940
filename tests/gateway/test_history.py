"""What clients do to the history between two requests, and what is trained all the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentrl.session import ChatFormat
from tests.gateway.test_chat_completions import TOOL, USER, call
from tests.support.asynchrony import asynchronous, until
from tests.support.gateway import Client, episode
from tests.support.rollout import HeldEngine
from tests.support.scripted import Script, assert_trained_as_sampled, says, turns

NEXT = {"role": "user", "content": "And 3 + 3?"}


async def turn(client: Client, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The message that answers."""
    return (await client.chat(*messages, **fields))["choices"][0]["message"]


def sampled(chat_format: ChatFormat, *texts: str) -> list[Any]:
    return [says(chat_format, text).token_ids for text in texts]


def by_last_message(chat_format: ChatFormat, answers: dict[str, str]) -> Script:
    """Says what belongs to the last of these words that the prompt holds."""

    def script(request: Any) -> Any:
        prompt = chat_format.tokenizer.decode(request.token_ids.tolist())
        key = max(answers, key=lambda word: prompt.rfind(word))
        return says(chat_format, answers[key])

    return script


@pytest.mark.parametrize("arguments", ['{"expression": "2 + 2"}', '{ "expression":"2 + 2" }'])
@pytest.mark.parametrize("content", [None, "", "absent"])
@asynchronous
async def test_a_call_that_comes_back_as_text_is_the_same_call(
    chat_format: ChatFormat, arguments: str, content: str | None
) -> None:
    """Case 15."""
    async with episode(chat_format, turns(chat_format, call(), "4")) as client:
        message = await turn(client, USER, tools=[TOOL])
        made = message["tool_calls"][0]
        made["function"]["arguments"] = arguments
        back: dict[str, Any] = {"role": "assistant", "tool_calls": [made], "content": content}
        if content == "absent":
            del back["content"]
        await turn(client, USER, back, {"role": "tool", "tool_call_id": made["id"], "content": "4"}, tools=[TOOL])
        (branch,) = client.session.graph.branches()
        assert_trained_as_sampled([branch], client.engine, sampled(chat_format, call(), "4"))
        prompt = client.engine.requests[1].token_ids.tolist()
        assert '"arguments": {"expression": "2 + 2"}' in chat_format.tokenizer.decode(prompt)


@pytest.mark.parametrize("arguments", ["{broken", "", "[1, 2]", "7", '"text"', "null", "{" * 5000])
@asynchronous
async def test_invalid_json_in_the_history_never_breaks_a_request(chat_format: ChatFormat, arguments: str) -> None:
    """Case 15."""
    made = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [made]}]
    limits_fit = len(arguments) < 100
    async with episode(chat_format, turns(chat_format, "4")) as client:
        body = {"model": "m", "messages": [*history, {"role": "tool", "tool_call_id": "c", "content": "4"}]}
        response = await client.post("/v1/chat/completions", {**body, "tools": [TOOL]})
        assert response.status_code == (200 if limits_fit else 400), response.text


@asynchronous
async def test_a_history_that_was_edited_forks(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "It is 4.", "6", "Six.")) as client:
        message = await turn(client, USER)
        await turn(client, USER, message, NEXT)
        await turn(client, USER, {**message, "content": "It is four."}, NEXT)
        branches = client.session.graph.branches()
        assert len(branches) == 2
        assert_trained_as_sampled(branches, client.engine, sampled(chat_format, "It is 4.", "6", "Six."))


@asynchronous
async def test_a_history_that_was_compacted_forks(chat_format: ChatFormat) -> None:
    summary = {"role": "user", "content": "So far: 2 + 2 is 4. Go on."}
    async with episode(chat_format, turns(chat_format, "It is 4.", "6", "Done.")) as client:
        message = await turn(client, USER)
        await turn(client, USER, message, NEXT)
        await turn(client, summary)
        branches = client.session.graph.branches()
        assert [len(branch.turns) for branch in branches] == [2, 1]
        assert_trained_as_sampled(branches, client.engine, sampled(chat_format, "It is 4.", "6", "Done."))


@asynchronous
async def test_a_template_that_strips_reasoning_makes_two_branches(chat_format: ChatFormat) -> None:
    """Case 12: each is trained on what the model saw."""
    thought = "<think>\nEasy.\n</think>\n\n4"
    async with episode(chat_format, turns(chat_format, thought, "6")) as client:
        message = await turn(client, USER)
        await turn(client, USER, message, NEXT)
        branches = client.session.graph.branches()
        assert len(branches) == 2
        assert_trained_as_sampled(branches, client.engine, sampled(chat_format, thought, "6"))
        assert "Easy" not in chat_format.tokenizer.decode(client.engine.requests[1].token_ids.tolist())


@asynchronous
async def test_reasoning_that_a_client_does_not_send_back_is_still_there(chat_format: ChatFormat) -> None:
    """Within a turn of tool calls the template keeps reasoning; that the client has no field for it changes nothing."""
    thought = f"<think>\nI look.\n</think>\n\n{call()}"
    async with episode(
        chat_format, turns(chat_format, thought, f"<think>\nAgain.\n</think>\n\n{call('3')}", "4")
    ) as client:
        history: list[dict[str, Any]] = [USER]
        for _ in range(3):
            message = await turn(client, *history, tools=[TOOL])
            message.pop("reasoning_content", None)
            history.append(message)
            history += [
                {"role": "tool", "tool_call_id": c["id"], "content": "4"} for c in message.get("tool_calls", ())
            ]
        (branch,) = client.session.graph.branches()
        assert len(branch.turns) == 3


@asynchronous
async def test_sub_agents_that_talk_at_once_are_branches_of_their_own(chat_format: ChatFormat) -> None:
    """Case 36: their turns interleave in time, and in no branch."""
    script = by_last_message(chat_format, {"planner": "plan", "coder": "code", "more": "more"})
    engine = HeldEngine(script)
    async with episode(chat_format, engine) as client:
        agents = {
            name: [{"role": "system", "content": f"You are the {name}."}, {"role": "user", "content": "Begin."}]
            for name in ("planner", "coder")
        }
        for count in (1, 2):
            asking = {name: asyncio.ensure_future(turn(client, *history)) for name, history in agents.items()}
            await until(lambda count=count: len(engine.held) == 2 * count)
            engine.let_go()
            for name, message in asking.items():
                agents[name] += [await message, {"role": "user", "content": "more, please"}]
        branches = client.session.graph.branches()
        texts = [chat_format.tokenizer.decode(branch.token_ids.tolist()) for branch in branches]
        assert len(branches) == 2
        assert all(len(branch.turns) == 2 for branch in branches)
        assert sorted(("planner" in text, "coder" in text) for text in texts) == [(False, True), (True, False)]


@asynchronous
async def test_a_sub_agent_in_between_does_not_cut_the_main_thread(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, call(), "sub", "4")) as client:
        message = await turn(client, USER, tools=[TOOL])
        await turn(client, {"role": "user", "content": "What does the tool say?"})
        made = message["tool_calls"][0]
        await turn(client, USER, message, {"role": "tool", "tool_call_id": made["id"], "content": "4"}, tools=[TOOL])
        main, sub = client.session.graph.branches()
        assert [len(main.turns), len(sub.turns)] == [2, 1]
        assert_trained_as_sampled([main, sub], client.engine, sampled(chat_format, call(), "sub", "4"))


@asynchronous
async def test_turns_get_rewards_of_their_own(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4", "6")) as client:
        first = await client.chat(USER)
        second = await client.chat(USER, first["choices"][0]["message"], NEXT)
        await client.chat(USER, n=2)
        for body, given, turns_of in ((second, 0.5, [1]), (first, -1.0, [0])):
            response = await client.post("/agentrl/reward", {"reward": given, "response_id": body["id"]})
            assert response.json() == {"episode_id": "e", "turns": turns_of}
        assert [node.reward for node in client.session.graph.turns] == [-1.0, 0.5, None, None]
        response = await client.post("/agentrl/reward", {"reward": 1, "response_id": "chatcmpl-x"})
        assert response.status_code == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"reward": "good"}, "Expected `float`"),
        ({}, "missing required field `reward`"),
        ({"reward": 1, "response_id": "x", "parts": {"a": 1}}, "belong to the reward of an episode"),
        ({"reward": 1, "bonus": 2}, "bonus is not supported"),
    ],
)
@asynchronous
async def test_rewards_that_are_none_are_refused(chat_format: ChatFormat, body: dict[str, Any], said: str) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        response = await client.post("/agentrl/reward", body)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        assert client.session.verdict is None


@asynchronous
async def test_the_reward_of_an_episode_has_parts(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        await client.post("/agentrl/reward", {"reward": 0.5, "parts": {"accuracy": 1}, "info": {"note": "ok"}})
        verdict = client.session.verdict
        assert verdict is not None
        assert (verdict.reward, verdict.parts, verdict.info) == (0.5, {"accuracy": 1.0}, {"note": "ok"})
        assert json.dumps(verdict.info)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@asynchronous
async def test_half_a_character_in_a_call_harms_nobody(chat_format: ChatFormat, path: str, stream: bool) -> None:
    """JSON can spell what no text can hold; a model may well sample it, and a client send it back."""
    said = call(r"\ud83d")
    body: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 100, "stream": stream}
    if path.endswith("responses"):
        body = {"model": "m", "input": [USER], "stream": stream}
    async with episode(chat_format, turns(chat_format, said, "4")) as client:
        response = await client.post(path, body)
        assert response.status_code == 200
        assert "\ufffd" in response.text
        made = {
            "id": "c",
            "type": "function",
            "function": {"name": "calculator", "arguments": r'{"expression": "\ud83d"}'},
        }
        answer = await turn(client, USER, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "4"})
        assert answer["content"] == "4"
        (branch,) = client.session.graph.branches()
        assert_trained_as_sampled([branch], client.engine, sampled(chat_format, said, "4"))
