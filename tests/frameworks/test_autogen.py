"""AutoGen's assistant agent."""

from __future__ import annotations

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage

from agentrl.agents.external import autogen_client
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, play


async def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


def agent(session: Session, *, streams: bool) -> AssistantAgent:
    return AssistantAgent(
        "solver",
        autogen_client(session),
        tools=[calculator],
        system_message=SYSTEM_PROMPT,
        max_tool_iterations=4,
        reflect_on_tool_use=False,
        model_client_stream=streams,
    )


async def solve(session: Session) -> str:
    return answer_of(await agent(session, streams=False).run(task=QUESTION))


async def stream(session: Session) -> str:
    events = [event async for event in agent(session, streams=True).run_stream(task=QUESTION)]
    assert any(isinstance(event, ModelClientStreamingChunkEvent) for event in events)
    result = events[-1]
    assert isinstance(result, TaskResult)
    return answer_of(result)


def answer_of(result: TaskResult) -> str:
    message = result.messages[-1]
    assert isinstance(message, TextMessage), message
    return message.content


@pytest.mark.parametrize("texts", [CHAIN, PARALLEL])
@asynchronous
async def test_calls_and_their_results_are_one_branch(texts: tuple[str, ...], chat_format: ChatFormat) -> None:
    played = await play(chat_format, solve, *texts)
    assert played.answer == ANSWER
    (branch,) = played.branches
    assert len(branch.turns) == 3
    assert "20" in played.prompts[-1]


@asynchronous
async def test_a_stream_leaves_the_same_record(chat_format: ChatFormat) -> None:
    whole = await play(chat_format, solve, *PARALLEL)
    streamed = await play(chat_format, stream, *PARALLEL)
    assert (streamed.answer, streamed.record) == (whole.answer, whole.record)
