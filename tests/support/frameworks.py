"""One episode of an agent of another framework: the real package, a real gateway and socket, a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentrl.record import Branch
from agentrl.record.protocols import GenerateRequest
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat, SamplingLimits, Session
from agentrl.session.blocking import BlockingPolicy, in_thread
from tests.support.gateway import episode
from tests.support.scripted import ScriptedEngine, assert_trained_as_sampled, says, turns

T = TypeVar("T")

QUESTION = "What is (2 + 3) * 4?"
ANSWER = "The answer is \\boxed{20}."
LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=4000, max_response_length=400, max_model_len=4400)
"""Wide enough for frameworks with long prompts of their own."""
VERSION = 3
"""Of the policy, throughout."""


def call(tool: str, **arguments: Any) -> str:
    """What the model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def calls(*expressions: str) -> str:
    """A turn that calls the calculator, once for each expression."""
    return "\n".join(call("calculator", expression=expression) for expression in expressions)


CHAIN = (calls("2 + 3"), calls("5 * 4"), ANSWER)
"""Two calls one after the other, then the answer."""
PARALLEL = (calls("2 + 3", "7 - 3"), calls("5 * 4"), ANSWER)
"""Two calls at once, one more, then the answer."""


@dataclass(frozen=True)
class Played:
    """What an episode left behind.

    Attributes:
        answer: what the agent returned.
        requests: what the engine was asked.
        prompts: of these, as text.
        trained: the turns that train, as text.
    """

    answer: Any
    branches: Sequence[Branch]
    requests: Sequence[GenerateRequest]
    prompts: Sequence[str]
    trained: Sequence[str]

    @property
    def record(self) -> list[tuple[list[int], list[int], list[float]]]:
        """All that is trained of it."""
        return [(b.token_ids.tolist(), b.loss_mask.tolist(), b.logprobs.tolist()) for b in self.branches]


async def play(chat_format: ChatFormat, agent: Callable[[Session], Awaitable[Any]], *texts: str) -> Played:
    """Lets `agent` play while the model says `texts`, one after the other.

    Checks that these very tokens are trained, with the engine's log-probs and version; where any turn was sampled under
    a grammar, what is trained is for the test to check.
    """
    engine = ScriptedEngine(turns(chat_format, *texts), version=VERSION)
    async with episode(chat_format, engine, LIMITS) as client:
        answer = await agent(client.session)
        branches = client.session.graph.branches()
    requests = engine.requests
    if not any(request.json_schema for request in requests):
        said = [says(chat_format, texts[min(number, len(texts) - 1)]) for number in range(len(requests))]
        assert_trained_as_sampled(branches, engine, [turn.token_ids for turn in said])
    trained: list[str] = []
    for branch in branches:
        for turn in branch.turns:
            if branch.loss_mask[turn.start]:
                np.testing.assert_array_equal(branch.versions[turn.start : turn.end], VERSION)
                trained.append(chat_format.decode(branch.token_ids[turn.start : turn.end - 1].tolist()))
    prompts = [chat_format.decode(request.token_ids.tolist()) for request in requests]
    return Played(answer, branches, requests, prompts, trained)


def blocking(agent: Callable[[SyncPolicy], T]) -> Callable[[Session], Awaitable[T]]:
    """A plain function as a run plays it: in a thread, with a policy that blocks."""

    async def run(session: Session) -> T:
        policy = BlockingPolicy(session, asyncio.get_running_loop())
        return await in_thread(lambda: agent(policy))

    return run
