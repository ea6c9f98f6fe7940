"""smolagents' tool-calling agent, which blocks."""

from __future__ import annotations

from typing import Any

from smolagents import LogLevel, ToolCallingAgent, tool

from agentrl.agents.external import smolagents_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, QUESTION, blocking, call, calls, play

TEXTS = calls("2 + 3", "7 - 3"), calls("5 * 4"), call("final_answer", answer=ANSWER)


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: what to evaluate.
    """
    return calculate(expression)


def solver(*, streams: bool) -> Any:
    def run(policy: SyncPolicy) -> Any:
        agent = ToolCallingAgent(
            [calculator], smolagents_model(policy), max_steps=4, stream_outputs=streams, verbosity_level=LogLevel.OFF
        )
        agent.prompt_templates["system_prompt"] = SYSTEM_PROMPT
        return agent.run(QUESTION)

    return blocking(run)


@asynchronous
async def test_every_turn_is_a_branch(chat_format: ChatFormat) -> None:
    played = await play(chat_format, solver(streams=False), *TEXTS)
    assert played.answer == ANSWER
    # The framework tells of earlier calls and their results in words of its own ("Calling tools: ...", "Observation:
    # ..."), so that no history continues an earlier turn.
    assert [len(branch.turns) for branch in played.branches] == [1, 1, 1]
    assert "Observation:\n5\n4" in played.prompts[1]


@asynchronous
async def test_a_stream_trains_the_same(chat_format: ChatFormat) -> None:
    whole = await play(chat_format, solver(streams=False), *TEXTS)
    streamed = await play(chat_format, solver(streams=True), *TEXTS)
    assert (streamed.answer, streamed.trained) == (whole.answer, whole.trained)
    # A turn without text is None to the framework, or "" if it was streamed, which it retells as an empty line.
    assert [prompt.replace("\n\nCalling", "\nCalling") for prompt in streamed.prompts] == list(whole.prompts)
