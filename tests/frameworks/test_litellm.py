"""LiteLLM, and mini-swe-agent, which rests on it."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment

from agentrl.agents.external import litellm_arguments, mini_swe_model
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, CHAIN, PARALLEL, QUESTION, blocking, call, play

COMMANDS = (
    call("bash", command="echo $((5 * 4))"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 20"),
)


def solver(*, streams: bool) -> Any:
    async def run(session: Session) -> str:
        messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": QUESTION}]
        while True:
            response: Any = await litellm.acompletion(
                messages=messages, tools=[CALCULATOR_SPEC], stream=streams, **litellm_arguments(session)
            )
            if streams:
                response = litellm.stream_chunk_builder([chunk async for chunk in response])
            message = response.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                return message.content
            for made in message.tool_calls:
                result = calculate(json.loads(made.function.arguments)["expression"])
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})

    return run


@pytest.mark.parametrize("texts", [CHAIN, PARALLEL])
@asynchronous
async def test_calls_and_their_results_are_one_branch(texts: tuple[str, ...], chat_format: ChatFormat) -> None:
    played = await play(chat_format, solver(streams=False), *texts)
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
async def test_mini_swe_agent_works_in_a_shell_until_it_submits(chat_format: ChatFormat) -> None:
    def run(policy: SyncPolicy) -> str:
        model = mini_swe_model(policy, observation_template="{{ output.output }}")
        agent = DefaultAgent(
            model, LocalEnvironment(), system_template="Use the shell.", instance_template="{{ task }}", step_limit=4
        )
        return agent.run(QUESTION)["submission"]

    played = await play(chat_format, blocking(run), *COMMANDS)
    assert played.answer.strip() == "20"
    (branch,) = played.branches
    assert len(branch.turns) == 2
    assert "20" in played.prompts[-1]
