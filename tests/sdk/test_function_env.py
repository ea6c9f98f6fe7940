"""An environment that is only a reward function."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from agentrl import Env, EnvError, FunctionEnv, Reward, Task, ToolAgentLoop, Transcript
from agentrl.record import Message
from agentrl.sdk import as_reward, plugin
from agentrl.sdk.plugin import PluginError, load_class
from tests.support.asynchrony import asynchronous
from tests.support.policy import ScriptedPolicy, answer

TASK = Task("What is 6 * 7?", "42")


def exact(transcript: Transcript) -> float:
    return float(transcript.answer == transcript.task.answer)


async def judged(transcript: Transcript) -> Reward:
    return Reward(0.5, {"length": float(len(transcript.answer))})


def crashes(transcript: Transcript) -> float:
    raise KeyError("the judge is down")


def nothing(transcript: Transcript) -> Any:
    return None


NO_FUNCTION = 3


@pytest.mark.parametrize(
    ("function", "said", "reward"),
    [("exact", "42", 1.0), ("exact", "43", 0.0), ("judged", "42", Reward(0.5, {"length": 2.0}))],
)
@asynchronous
async def test_the_function_scores_the_answer(function: str, said: str, reward: Any) -> None:
    policy = ScriptedPolicy(answer(said))
    env = FunctionEnv(f"{__name__}:{function}", system_prompt="Be brief.")
    assert await ToolAgentLoop(env).run(TASK, policy) == as_reward(reward)
    assert policy.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}]]
    assert policy.tools == [None]


@asynchronous
async def test_a_task_has_one_system_prompt() -> None:
    env = FunctionEnv(f"{__name__}:exact", system_prompt="Be brief.")
    own: list[Message] = [{"role": "system", "content": "Be wordy."}, {"role": "user", "content": "Why?"}]
    assert await env.reset(Task(own, "")) == own


def test_the_function_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def entry_points(*, group: str) -> EntryPoints:
        looked_up.append(group)
        return EntryPoints([EntryPoint("looked-up-once", f"{__name__}:exact", group)])

    monkeypatch.setattr(plugin, "entry_points", entry_points)
    for _ in range(3):
        FunctionEnv.check_arguments(reward="looked-up-once")
        FunctionEnv("looked-up-once")
    assert looked_up == ["agentrl.rewards"]


@asynchronous
async def test_a_function_that_crashes_is_no_judgement() -> None:
    with pytest.raises(EnvError, match="the judge is down"):
        await ToolAgentLoop(FunctionEnv(f"{__name__}:crashes")).run(TASK, ScriptedPolicy(answer("42")))


@asynchronous
async def test_a_function_that_gives_no_reward_is_a_failure_of_the_environment() -> None:
    with pytest.raises(EnvError, match="the reward must be a number"):
        await ToolAgentLoop(FunctionEnv(f"{__name__}:nothing")).run(TASK, ScriptedPolicy(answer("42")))


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (f"{__name__}:nowhere", "env.args.reward: module .* has no 'nowhere'"),
        ("exakt", "env.args.reward: 'exakt' is neither .* did you mean 'exact'"),
        (5, "env.args.reward is 5: use package.module:function"),
        (f"{__name__}:NO_FUNCTION", "env.cls: agentrl:FunctionEnv: .* is 3: name a function: see env.args"),
    ],
)
def test_a_function_that_is_not_there_is_found_out_at_load(
    reward: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("exact", f"{__name__}:exact", "agentrl.rewards")
    monkeypatch.setattr(plugin, "entry_points", lambda *, group: EntryPoints([point]).select(group=group))
    with pytest.raises(PluginError, match=says):
        load_class("agentrl:FunctionEnv", Env, key="env.cls", group="agentrl.envs", kwargs={"reward": reward})
    assert load_class("agentrl:FunctionEnv", Env, key="env.cls", kwargs={"reward": "exact"}) is FunctionEnv
