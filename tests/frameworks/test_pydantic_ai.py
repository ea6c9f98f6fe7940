"""Pydantic AI's agent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput

from agentrl.agents.external import pydantic_ai_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, call, calls, play


class Result(BaseModel):
    value: int


class Solver:
    """One run of an agent; `stream` for a streamed one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    async def __call__(self, session: Session) -> Any:
        return (await self._agent(session).run(QUESTION)).output

    async def stream(self, session: Session) -> Any:
        async with self._agent(session).run_stream(QUESTION) as result:
            return "".join([delta async for delta in result.stream_text(delta=True)])

    def _agent(self, session: Session) -> Agent[None, Any]:
        agent = Agent(pydantic_ai_model(session), system_prompt=SYSTEM_PROMPT, **self.settings)

        @agent.tool_plain
        def calculator(expression: str) -> str:
            return calculate(expression)

        return agent


@pytest.mark.parametrize("texts", [CHAIN, PARALLEL])
@asynchronous
async def test_calls_and_their_results_are_one_branch(texts: tuple[str, ...], chat_format: ChatFormat) -> None:
    played = await play(chat_format, Solver(), *texts)
    assert played.answer == ANSWER
    (branch,) = played.branches
    assert len(branch.turns) == 3
    assert "20" in played.prompts[-1]


@asynchronous
async def test_a_stream_leaves_the_same_record(chat_format: ChatFormat) -> None:
    whole = await play(chat_format, Solver(), *PARALLEL)
    streamed = await play(chat_format, Solver().stream, *PARALLEL)
    assert (streamed.answer, streamed.record) == (whole.answer, whole.record)


@asynchronous
async def test_an_output_tool_is_called_freely_and_so_trained(chat_format: ChatFormat) -> None:
    texts = calls("2 + 3"), call("final_result", value=20)
    played = await play(chat_format, Solver(output_type=Result), *texts)
    assert played.answer == Result(value=20)
    assert played.trained == list(texts)


@asynchronous
async def test_native_output_guides_the_answer_and_not_the_calls(chat_format: ChatFormat) -> None:
    texts = calls("2 + 3"), "I am done.", '{"value": 20}'
    played = await play(chat_format, Solver(output_type=NativeOutput(Result)), *texts)
    assert played.answer == Result(value=20)
    assert [bool(request.json_schema) for request in played.requests] == [False, False, True]
    assert played.trained == [calls("2 + 3")]
