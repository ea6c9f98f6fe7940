"""One episode: every way it can end has a type, and none escapes or becomes a reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import AgentLoop, Env, EnvError, Policy, Reward, Task, ToolAgentLoop, tool
from agentrl.envs.math import ArithmeticEnv
from agentrl.record import ContextOverflow, EngineError, Fate, Message, PeerLost
from agentrl.sdk import Transcript
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.rollout import TASK, HeldEngine
from tests.support.scripted import Sampled, ScriptedEngine, encode, says, turns

Play = Callable[..., Any]


class Solver(AgentLoop):
    async def run(self, task: Task, policy: Policy) -> Any:
        reply = await policy.chat(task.messages())
        return Reward(float(reply.text == task.answer), parts={"length": 1.0}, info={"said": reply.text})


@asynchronous
async def test_a_judged_episode_becomes_a_trajectory(play: Play, chat_format: ChatFormat) -> None:
    outcome = await play(Solver)
    trajectory = outcome.trajectory
    assert (outcome.failure, outcome.usable, outcome.reward.value) == (None, True, 1.0)
    assert (trajectory.task_id, trajectory.dataset_index, trajectory.epoch) == ("t3", 3, 1)
    assert (trajectory.group_id, trajectory.episode_id, trajectory.status) == ("g0", "g0.1", "completed")
    assert (trajectory.reward, trajectory.reward_parts, trajectory.info) == (1.0, {"length": 1.0}, {"said": "4"})
    assert trajectory.sampled_tokens == len(says(chat_format, "4").token_ids)
    assert trajectory.timings["episode"] == outcome.seconds >= 0


@asynchronous
async def test_an_answer_cut_by_the_limit_is_marked_truncated_when_it_is_scored(play: Play) -> None:
    outcome = await play(Solver, lambda request: Sampled([70, 71], "length"))
    assert (outcome.failure, outcome.trajectory.status) == (None, "truncated")


@asynchronous
async def test_training_and_validation_have_temperatures_of_their_own(play: Play, chat_format: ChatFormat) -> None:
    temperatures = []
    for task in (TASK, Task("x", split="val")):
        engine = ScriptedEngine(turns(chat_format, "4"))
        config = ("rollout.temperature=0.8", "val.temperature=0", "data.val=agentrl.envs.math:arithmetic_tasks")
        await play(Solver, engine, *config, task=task)
        temperatures.append(engine.requests[0].temperature)
    assert temperatures == [0.8, 0.0]


@asynchronous
async def test_the_ready_loop_plays_the_arithmetic_environment(play: Play, chat_format: ChatFormat) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
    engine = ScriptedEngine(turns(chat_format, call, "The answer is \\boxed{4}."))
    outcome = await play(ToolAgentLoop, engine, env=ArithmeticEnv)
    assert outcome.reward == Reward(1.0, {"accuracy": 1.0, "tool_calls": 1.0})
    assert [len(branch.turns) for branch in outcome.trajectory.branches] == [2]
    assert "<tool_response>\n4\n" in chat_format.tokenizer.decode(engine.requests[1].token_ids.tolist())


def raising(error: BaseException, *, after_a_turn: bool = True) -> type[AgentLoop]:
    class Failing(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            if after_a_turn:
                await policy.chat(task.messages())
            raise error

    return Failing


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (RuntimeError("bug"), Fate.AGENT_ERROR),
        (KeyError("bug"), Fate.AGENT_ERROR),
        (TimeoutError("its own"), Fate.AGENT_ERROR),
        (EnvError("the sandbox died"), Fate.ENV_ERROR),
        (EngineError("gone"), Fate.ENGINE_ERROR),
        (PeerLost("gone"), Fate.ENGINE_ERROR),
        (ContextOverflow("too long"), Fate.TRUNCATED),
        (SystemExit(2), Fate.AGENT_ERROR),
        (ExceptionGroup("two agents", [ValueError("bug"), EngineError("gone")]), Fate.ENGINE_ERROR),
        (ExceptionGroup("nested", [ExceptionGroup("", [EnvError("died")])]), Fate.ENV_ERROR),
        (ExceptionGroup("two agents", [ContextOverflow("long"), ValueError("bug")]), Fate.AGENT_ERROR),
    ],
    ids=repr,
)
@asynchronous
async def test_what_is_raised_decides_the_fate(play: Play, error: BaseException, fate: Fate) -> None:
    outcome = await play(raising(error), None, "rollout.on_truncation=exclude")
    assert (outcome.failure, outcome.reward, outcome.usable) == (fate, None, False)
    assert outcome.reason
    assert outcome.trajectory.status == ("truncated" if fate is Fate.TRUNCATED else "aborted"), "it is kept"


@asynchronous
async def test_a_failing_engine_is_an_engine_error(play: Play) -> None:
    outcome = await play(Solver, lambda request: EngineError("out of memory"))
    assert (outcome.failure, outcome.reason) == (Fate.ENGINE_ERROR, "EngineError: out of memory")
    assert outcome.trajectory is None


@asynchronous
async def test_a_prompt_too_long_is_truncated(play: Play) -> None:
    long = Task([{"role": "user", "content": "word " * 500}])
    outcome = await play(Solver, None, "data.max_prompt_length=64", task=long)
    assert outcome.failure is Fate.TRUNCATED
    assert "data.max_prompt_length is 64" in outcome.reason
    ready = await play(ToolAgentLoop, None, "data.max_prompt_length=64", env=ArithmeticEnv, task=long)
    assert ready.failure is Fate.TRUNCATED


@asynchronous
async def test_an_episode_that_runs_too_long_is_a_timeout(play: Play, chat_format: ChatFormat) -> None:
    engine = HeldEngine(turns(chat_format, "4"))
    outcome = await play(Solver, engine, "rollout.episode_timeout=0.05")
    assert (outcome.failure, outcome.reason) == (Fate.TIMEOUT, "ran longer than rollout.episode_timeout = 0.05 s")


@asynchronous
async def test_an_agent_that_turns_its_cancellation_into_another_error_still_timed_out(play: Play) -> None:
    class Wrapping(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError("wrapped") from None
            return 1.0

    assert (await play(Wrapping, None, "rollout.episode_timeout=0.05")).failure is Fate.TIMEOUT


@pytest.mark.parametrize("how", ["raise", "cancel"])
@asynchronous
async def test_an_agent_that_cancels_itself_ends_as_its_own_error(play: Play, how: str) -> None:
    """Case 21: neither the runner nor anybody else is cancelled with it."""

    class Cancelling(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            if how == "raise":
                raise asyncio.CancelledError
            task_now = asyncio.current_task()
            assert task_now is not None
            task_now.cancel()
            await asyncio.sleep(0)
            return 1.0

    outcome = await play(Cancelling)
    assert (outcome.failure, outcome.reason) == (Fate.AGENT_ERROR, "the agent cancelled itself")


@asynchronous
async def test_a_real_shutdown_passes_through_and_closes_the_environment(play: Play, chat_format: ChatFormat) -> None:
    closed = asyncio.Event()

    class Room(ArithmeticEnv):
        async def close(self) -> None:
            closed.set()

    engine = HeldEngine(turns(chat_format, "4"))
    episode = asyncio.ensure_future(play(ToolAgentLoop, engine, env=Room))
    await until(lambda: bool(engine.held))
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert closed.is_set()


@asynchronous
async def test_an_agent_without_any_model_call_is_an_error_not_a_zero(play: Play) -> None:
    """Case 38."""

    class Silent(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            return 0.0

    outcome = await play(Silent)
    assert (outcome.failure, outcome.reward, outcome.trajectory) == (Fate.AGENT_ERROR, None, None)
    assert "without any model call" in outcome.reason


@pytest.mark.parametrize("value", [None, "yes", float("nan"), Reward(1.0, info={"x": object()})], ids=repr)
@asynchronous
async def test_what_is_no_reward_is_the_agents_error(play: Play, value: Any) -> None:
    class Odd(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> Any:
            await policy.chat(task.messages())
            return value

    outcome = await play(Odd)
    assert (outcome.failure, outcome.reward) == (Fate.AGENT_ERROR, None)


class Fragile(Env):
    """Fails where `env.args` says."""

    closed = 0

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        if fails == "init":
            raise OSError("no disk")

    async def reset(self, task: Task) -> list[Message]:
        self._may_fail("reset")
        return task.messages()

    async def score(self, transcript: Transcript) -> float:
        self._may_fail("score")
        return 1.0

    async def close(self) -> None:
        type(self).closed += 1
        self._may_fail("close")

    def _may_fail(self, where: str) -> None:
        if self.fails == where:
            raise OSError("no disk")


@pytest.mark.parametrize(
    ("fails", "fate", "closed"),
    [
        ("", None, 1),
        ("init", Fate.ENV_ERROR, 0),
        ("reset", Fate.ENV_ERROR, 1),
        ("score", Fate.ENV_ERROR, 1),
        ("close", None, 1),
    ],
)
@asynchronous
async def test_an_environment_that_fails_is_no_judgement_and_is_closed(
    play: Play, fails: str, fate: Fate | None, closed: int
) -> None:
    Fragile.closed = 0
    arguments = json.dumps({"fails": fails})
    outcome = await play(ToolAgentLoop, None, f"env.args={arguments}", "env.cls=x:Fragile", env=Fragile)
    assert (outcome.failure, Fragile.closed) == (fate, closed)
    assert (outcome.reward is None) == (fate is not None)


@asynchronous
async def test_a_judged_answer_stays_judged_however_long_the_environment_takes_to_close(play: Play) -> None:
    class SlowToClose(Env):
        async def score(self, transcript: Transcript) -> float:
            return 1.0

        async def close(self) -> None:
            await asyncio.sleep(0.3)

    outcome = await play(ToolAgentLoop, None, "rollout.episode_timeout=0.2", env=SlowToClose)
    assert (outcome.failure, outcome.reward.value) == (None, 1.0)


@asynchronous
async def test_every_episode_has_an_agent_and_an_environment_of_its_own(play: Play) -> None:
    seen: list[tuple[int, int]] = []

    class Counting(ToolAgentLoop):
        async def run(self, task: Task, policy: Policy) -> Any:
            seen.append((id(self), id(self.env)))
            keep.append((self, self.env))
            return await super().run(task, policy)

    keep: list[Any] = []
    for _ in range(2):
        await play(Counting, env=Fragile)
    assert len({agent for agent, _ in seen}) == len({env for _, env in seen}) == 2


@asynchronous
async def test_what_an_agent_does_to_its_task_stays_in_its_episode(play: Play) -> None:
    class Editing(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            messages = task.messages()
            messages[0]["content"] += " Think."
            task.data["seen"] = task.data.get("seen", 0) + 1
            await policy.chat(messages)
            return float(messages[0]["content"].count("Think.") + task.data["seen"])

    task = Task([{"role": "user", "content": "What is 2 + 2?"}], "4")
    assert [(await play(Editing, task=task)).reward.value for _ in range(3)] == [2.0, 2.0, 2.0]


@asynchronous
async def test_parallel_calls_of_one_agent_are_branches_of_one_trajectory(play: Play, chat_format: ChatFormat) -> None:
    class Pair(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            async with asyncio.TaskGroup() as both:
                for name in "AB":
                    both.create_task(policy.chat([{"role": "user", "content": f"agent {name}"}]))
            return 1.0

    outcome = await play(Pair)
    assert len(outcome.trajectory.branches) == outcome.trajectory.turns == 2
    assert outcome.trajectory.sampled_tokens == 2 * (len(encode(chat_format, "4")) + 1)


class LongTool(ArithmeticEnv):
    """A tool whose answer fills the context."""

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression."""
        return "1 " * 400


@pytest.mark.parametrize(("policy", "fate"), [("score", None), ("exclude", Fate.TRUNCATED)])
@asynchronous
async def test_an_overflow_that_the_agent_caught_and_scored_is_a_truncation_all_the_same(
    play: Play, chat_format: ChatFormat, policy: str, fate: Fate | None
) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
    keys = (f"rollout.on_truncation={policy}", "data.max_prompt_length=400")
    outcome = await play(ToolAgentLoop, turns(chat_format, call), *keys, env=LongTool)
    assert (outcome.failure, outcome.usable) == (fate, fate is None)
    assert outcome.trajectory.status == "truncated"
