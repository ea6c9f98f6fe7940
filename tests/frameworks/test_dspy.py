"""DSPy: a ReAct module and structured output."""

from __future__ import annotations

from typing import Any

import dspy

from agentrl.agents.external import dspy_lm
from agentrl.envs.math.arithmetic import calculate
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import QUESTION, blocking, play


def thinks(thought: str, tool: str, arguments: str) -> str:
    return (
        f"[[ ## next_thought ## ]]\n{thought}\n\n[[ ## next_tool_name ## ]]\n{tool}\n\n"
        f"[[ ## next_tool_args ## ]]\n{arguments}\n\n[[ ## completed ## ]]"
    )


REACT = (
    thinks("Add first.", "calculator", '{"expression": "2 + 3"}'),
    thinks("Now multiply.", "calculator", '{"expression": "5 * 4"}'),
    thinks("Done.", "finish", "{}"),
    "[[ ## reasoning ## ]]\nIt is 5 * 4.\n\n[[ ## answer ## ]]\n20\n\n[[ ## completed ## ]]",
)


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


def react(policy: SyncPolicy) -> Any:
    with dspy.context(lm=dspy_lm(policy)):
        return dspy.ReAct("question -> answer: int", tools=[calculator], max_iters=4)(question=QUESTION).answer


@asynchronous
async def test_react(chat_format: ChatFormat) -> None:
    played = await play(chat_format, blocking(react), *REACT)
    print(played.prompts, played.answer)
    assert played.answer == 20
    assert [len(branch.turns) for branch in played.branches] == [1, 1, 1, 1]
