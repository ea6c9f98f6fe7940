"""An agent whose `run` is a plain function: it plays in a thread, and its episode ends like any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import AgentLoop, EnvError, Policy, Reward, Task
from agentrl.record import EngineError, EpisodeClosed, Fate
from agentrl.sdk import SyncPolicy
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.rollout import HeldEngine
from tests.support.scripted import turns

Play = Callable[..., Any]


class Plain(AgentLoop):
    """A synchronous agent."""

    def run(self, task: Task, policy: SyncPolicy) -> float:  # type: ignore[override]
        reply = policy.chat(task.messages())
        policy.reward(0.5)
        completion = policy.generate([70, 71])
        assert threading.current_thread() is not threading.main_thread()
        return float(reply.text == "4" and completion.turn == 1)


@asynchronous
async def test_a_plain_run_plays_in_a_thread_while_the_loop_goes_on(play: Play) -> None:
    outcome = await play(Plain)
    assert (outcome.failure, outcome.reason, outcome.reward) == (None, "", Reward(1.0))
    assert [turn.reward for branch in outcome.trajectory.branches for turn in branch.turns] == [0.5, None]


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (RuntimeError("bug"), Fate.AGENT_ERROR),
        (StopIteration(), Fate.AGENT_ERROR),
        (SystemExit(1), Fate.AGENT_ERROR),
        (EnvError("died"), Fate.ENV_ERROR),
    ],
    ids=repr,
)
@asynchronous
async def test_a_plain_run_fails_like_any_other(play: Play, error: BaseException, fate: Fate) -> None:
    class Failing(AgentLoop):
        def run(self, task: Task, policy: Any) -> float:
            raise error

    assert (await play(Failing)).failure is fate


@asynchronous
async def test_a_plain_run_sees_the_errors_of_the_model_as_they_are(play: Play) -> None:
    assert (await play(Plain, lambda request: EngineError("gone"))).failure is Fate.ENGINE_ERROR
    assert (await play(Plain, None, "data.max_prompt_length=1")).failure is Fate.TRUNCATED


@asynchronous
async def test_a_thread_that_outlives_its_episode_gets_no_further_answer(play: Play, chat_format: ChatFormat) -> None:
    ended, failed = threading.Event(), threading.Event()

    class Stubborn(AgentLoop):
        def run(self, task: Task, policy: Any) -> float:
            ended.wait(5)
            try:
                policy.chat(task.messages())
            except EpisodeClosed:
                failed.set()
            return 1.0

    outcome = await play(Stubborn, None, "rollout.episode_timeout=0.05")
    ended.set()
    assert outcome.failure is Fate.TIMEOUT
    assert await asyncio.to_thread(failed.wait, 5)


@asynchronous
async def test_a_plain_runs_model_call_ends_with_its_episode(play: Play, chat_format: ChatFormat) -> None:
    class Plain(AgentLoop):
        def run(self, task: Task, policy: Any) -> float:
            policy.chat(task.messages())
            return 1.0

    engine = HeldEngine(turns(chat_format, "4"))
    assert (await play(Plain, engine, "rollout.episode_timeout=0.1")).failure is Fate.TIMEOUT
    await until(lambda: not engine.running)


@asynchronous
async def test_an_agent_that_swallows_its_cancellation_does_not_hold_the_run(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.episode._CLOSE_SECONDS", 0.1)
    done = asyncio.Event()

    class Stubborn(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            while not done.is_set():
                try:
                    await done.wait()
                except asyncio.CancelledError:
                    continue
            return 1.0

    assert (await play(Stubborn, None, "rollout.episode_timeout=0.05")).failure is Fate.TIMEOUT
    done.set()


@asynchronous
async def test_a_plain_run_that_returns_a_coroutine_is_told_to_be_async(play: Play) -> None:
    class Confused(AgentLoop):
        def run(self, task: Task, policy: Any) -> Any:
            async def later() -> float:
                return 1.0

            return later()

    outcome = await play(Confused)
    assert outcome.failure is Fate.AGENT_ERROR
    assert "declare it `async def`" in outcome.reason
