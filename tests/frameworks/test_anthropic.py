"""Anthropic's own SDK, alone and under Pydantic AI."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

from agentrl.agents.external import anthropic_client
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, play
from tests.support.gateway import episode
from tests.support.scripted import turns

FUNCTION = CALCULATOR_SPEC["function"]
TOOL: Any = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"], "description": FUNCTION["description"]}


def solver(*, streams: bool) -> Any:
    async def run(session: Session) -> str:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        async with anthropic_client(session) as client:
            while True:
                request: Any = {"system": SYSTEM_PROMPT, "messages": messages, "tools": [TOOL]}
                request |= {"model": session.model, "max_tokens": 400}
                if streams:
                    async with client.messages.stream(**request) as stream:
                        message = await stream.get_final_message()
                else:
                    message = await client.messages.create(**request)
                messages.append({"role": "assistant", "content": message.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input["expression"])}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                if not results:
                    return "".join(block.text for block in message.content if block.type == "text")
                messages.append({"role": "user", "content": results})

    return run


async def pydantic_ai(session: Session) -> str:
    provider = AnthropicProvider(anthropic_client=anthropic_client(session))
    agent = Agent(AnthropicModel(session.model, provider=provider), system_prompt=SYSTEM_PROMPT)

    @agent.tool_plain
    def calculator(expression: str) -> str:
        return calculate(expression)

    return (await agent.run(QUESTION)).output


@pytest.mark.parametrize("texts", [CHAIN, PARALLEL])
@pytest.mark.parametrize("agent", [solver(streams=False), pydantic_ai], ids=["sdk", "pydantic_ai"])
@asynchronous
async def test_calls_and_their_results_are_one_branch(
    agent: Any, texts: tuple[str, ...], chat_format: ChatFormat
) -> None:
    played = await play(chat_format, agent, *texts)
    assert played.answer == ANSWER
    (branch,) = played.branches
    assert len(branch.turns) == 3
    assert "20" in played.prompts[-1]


@asynchronous
async def test_a_stream_leaves_the_same_record(chat_format: ChatFormat) -> None:
    whole = await play(chat_format, solver(streams=False), *PARALLEL)
    streamed = await play(chat_format, solver(streams=True), *PARALLEL)
    assert (streamed.answer, streamed.record) == (whole.answer, whole.record)


@asynchronous
async def test_refusals_are_the_sdks_own_exceptions(chat_format: ChatFormat) -> None:
    request: Any = {"model": "any", "max_tokens": 10, "messages": [{"role": "user", "content": QUESTION}]}
    async with episode(chat_format, turns(chat_format, ANSWER)) as client, anthropic_client(client.session) as own:
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported here"):
            await own.messages.create(**request, extra_body={"mcp_servers": [{"name": "x"}]})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has"):
            await own.messages.create(**{**request, "messages": [{"role": "user", "content": "2 " * 2000}]})
        with pytest.raises(anthropic.AuthenticationError, match="this key opens no running episode"):
            await own.with_options(api_key="agentrl-wrong").messages.create(**request)
        client.engine.lose()
        with pytest.raises(anthropic.InternalServerError, match="no engine could answer"):
            await own.with_options(max_retries=0).messages.create(**request)
