"""OpenAI's Agents SDK, over Responses and over Chat Completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, Model, Runner, function_tool
from pydantic import BaseModel

from agentrl.agents.external import agents_sdk_chat_model, agents_sdk_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, calls, play

pytestmark = pytest.mark.parametrize("model_of", [agents_sdk_model, agents_sdk_chat_model])
ModelOf = Callable[[Session], Model]


class Result(BaseModel):
    value: int


@function_tool
def calculator(expression: str) -> str:
    return calculate(expression)


class Solver:
    """One run of an agent; `stream` for a streamed one."""

    def __init__(self, model_of: ModelOf, **settings: Any) -> None:
        self.model_of = model_of
        self.settings = settings

    async def __call__(self, session: Session) -> Any:
        return (await Runner.run(self._agent(session), QUESTION)).final_output

    async def stream(self, session: Session) -> Any:
        result = Runner.run_streamed(self._agent(session), QUESTION)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
        return result.final_output

    def _agent(self, session: Session) -> Agent:
        model = self.model_of(session)
        return Agent("solver", instructions=SYSTEM_PROMPT, tools=[calculator], model=model, **self.settings)


@pytest.mark.parametrize("texts", [CHAIN, PARALLEL])
@asynchronous
async def test_calls_and_their_results_are_one_branch(
    model_of: ModelOf, texts: tuple[str, ...], chat_format: ChatFormat
) -> None:
    played = await play(chat_format, Solver(model_of), *texts)
    assert played.answer == ANSWER
    (branch,) = played.branches
    assert len(branch.turns) == 3
    assert "20" in played.prompts[-1]


@asynchronous
async def test_a_stream_leaves_the_same_record(model_of: ModelOf, chat_format: ChatFormat) -> None:
    whole = await play(chat_format, Solver(model_of), *PARALLEL)
    streamed = await play(chat_format, Solver(model_of).stream, *PARALLEL)
    assert (streamed.answer, streamed.record) == (whole.answer, whole.record)


@asynchronous
async def test_an_output_type_guides_the_answer_and_not_the_calls(model_of: ModelOf, chat_format: ChatFormat) -> None:
    texts = calls("2 + 3"), "I am done.", '{"value": 20}'
    played = await play(chat_format, Solver(model_of, output_type=Result), *texts)
    assert played.answer == Result(value=20)
    assert [bool(request.json_schema) for request in played.requests] == [False, False, True]
    assert played.trained == [calls("2 + 3")]
