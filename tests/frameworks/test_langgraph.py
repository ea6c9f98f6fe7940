"""LangGraph's agent, with LangChain's chat model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.tools import tool

from agentrl.agents.external import langchain_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, play

GIVEN: Any = {"messages": [{"role": "user", "content": QUESTION}]}


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


def agent(session: Session) -> Any:
    return create_agent(langchain_model(session), [calculator], system_prompt=SYSTEM_PROMPT)


async def solve(session: Session) -> str:
    state = await agent(session).ainvoke(GIVEN)
    return state["messages"][-1].content


async def stream(session: Session) -> str:
    chunks = [
        chunk
        async for chunk, about in agent(session).astream(GIVEN, stream_mode="messages")
        if about["langgraph_node"] == "model"
    ]
    last = chunks[-1].id
    return "".join(chunk.content for chunk in chunks if chunk.id == last)


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
