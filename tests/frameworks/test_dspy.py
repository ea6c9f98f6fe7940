"""DSPy: a ReAct module, and structured output. Its prompts are its own, and it parses the answers' text itself."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from pydantic import BaseModel

from agentrl.agents.external import dspy_lm
from agentrl.envs.math.arithmetic import calculate
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import QUESTION, blocking, play


class Result(BaseModel):
    value: int


def fields(**values: str) -> str:
    """A turn in the form that DSPy's default adapter reads."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**values, "completed": ""}.items()).strip()


REACT = (
    fields(next_thought="Add.", next_tool_name="calculator", next_tool_args='{"expression": "2 + 3"}'),
    fields(next_thought="Multiply.", next_tool_name="calculator", next_tool_args='{"expression": "5 * 4"}'),
    fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
    fields(reasoning="It is 5 * 4.", answer="20"),
)


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


def react() -> Any:
    return dspy.ReAct("question -> answer: int", tools=[calculator], max_iters=4)


def solve(policy: SyncPolicy) -> int:
    with dspy.context(lm=dspy_lm(policy)):
        return react()(question=QUESTION).answer


async def stream(session: Session) -> int:
    with dspy.context(lm=dspy_lm(session)):
        parts = [part async for part in dspy.streamify(react())(question=QUESTION)]
    assert len(parts) > len(REACT)
    return parts[-1].answer


@asynchronous
async def test_every_turn_is_a_branch(chat_format: ChatFormat) -> None:
    played = await play(chat_format, blocking(solve), *REACT)
    assert played.answer == 20
    # The trajectory so far is told anew in the one user message of each prompt.
    assert [len(branch.turns) for branch in played.branches] == [1, 1, 1, 1]
    assert "[[ ## observation_1 ## ]]\n20" in played.prompts[2]


@asynchronous
async def test_a_stream_leaves_the_same_record(chat_format: ChatFormat) -> None:
    whole = await play(chat_format, blocking(solve), *REACT)
    streamed = await play(chat_format, stream, *REACT)
    assert (streamed.answer, streamed.record) == (whole.answer, whole.record)


@asynchronous
async def test_equal_questions_are_asked_twice(chat_format: ChatFormat) -> None:
    def ask_twice(policy: SyncPolicy) -> list[str]:
        with dspy.context(lm=dspy_lm(policy)):
            return [dspy.Predict("question -> answer")(question=QUESTION).answer for _ in range(2)]

    played = await play(chat_format, blocking(ask_twice), fields(answer="20"), fields(answer="21"))
    assert played.answer == ["20", "21"]


@pytest.mark.parametrize(
    ("adapter", "text"),
    [(dspy.ChatAdapter(), fields(result='{"value": 20}')), (dspy.JSONAdapter(), '{"result": {"value": 20}}')],
    ids=["chat", "json"],
)
@asynchronous
async def test_a_typed_result_is_asked_for_and_parsed(adapter: Any, text: str, chat_format: ChatFormat) -> None:
    signature = dspy.Signature("question -> result: Result", custom_types={"Result": Result})

    def ask(policy: SyncPolicy) -> Result:
        with dspy.context(lm=dspy_lm(policy), adapter=adapter):
            return dspy.Predict(signature)(question=QUESTION).result

    played = await play(chat_format, blocking(ask), text)
    assert played.answer == Result(value=20)
    # DSPy sends a schema only to models that it knows to take one: what it gets is sampled freely, and so trained.
    assert played.trained == [text]
