"""Mathematical environments with the agents that play them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.agents.math import MathAgent, SingleTurnAgent
from agentrl.envs import math as math_envs
from agentrl.envs.math import MathEnv, ReasoningGymEnv, reasoning_gym_tasks
from agentrl.record import EnvError, Reply, Task
from agentrl.sdk import Env, Reward
from agentrl.sdk.plugin import PluginError, load_class
from agentrl.sdk.reward import as_reward
from tests.support.asynchrony import asynchronous
from tests.support.policy import ScriptedPolicy, answer, calls

TASK = Task("How many clips?", "48+24 = <<48+24=72>>72\n#### 72")


async def single_turn(text: str, task: Task = TASK, **arguments: Any) -> Reward:
    policy = ScriptedPolicy(answer(text))
    reward = as_reward(await SingleTurnAgent(MathEnv(**arguments)).run(task, policy))
    assert policy.tools == [None]
    return reward


@asynchronous
async def test_a_right_a_wrong_and_no_answer() -> None:
    right = await single_turn("It is \\boxed{72}.")
    assert (right.value, right.solved) == (1.0, True)
    assert right.parts == {
        "accuracy": 1.0,
        "has_answer": 1.0,
        "verify_timeout": 0.0,
        "verify_error": 0.0,
        "tool_calls": 0.0,
    }
    assert right.info == {"outcome": "equal", "gold": "72", "answer": "72"}
    wrong = await single_turn("#### 73")
    assert (wrong.value, wrong.info["outcome"], wrong.parts["has_answer"]) == (0.0, "different", 1.0)
    none = await single_turn("It is 72.")
    assert (none.value, none.info["outcome"], none.parts["has_answer"]) == (0.0, "no_answer", 0.0)
    unfinished = await single_turn("It is \\boxed{72}. But wait, actually \\boxed{")
    assert (unfinished.value, unfinished.info["outcome"]) == (0.0, "no_answer")


@asynchronous
async def test_a_bomb_is_worth_nothing_and_counted_apart() -> None:
    reward = await single_turn("\\boxed{9999999!}", verify_timeout=0.5)
    assert (reward.value, reward.parts["verify_timeout"], reward.parts["verify_error"]) == (0.0, 1.0, 0.0)
    assert reward.info["detail"] == "not judged in 0.5 s"


@asynchronous
async def test_the_format_reward() -> None:
    assert (await single_turn("\\boxed{73}", format_reward=0.1)).value == 0.1
    assert (await single_turn("\\boxed{72}", format_reward=0.1)).solved
    assert (await single_turn("73", format_reward=0.1)).value == 0.0
    assert (await single_turn("\\boxed{72}", answer_format="gsm8k", format_reward=0.1)).value == 0.0


@asynchronous
async def test_a_task_without_an_answer_is_a_failure_of_the_machinery() -> None:
    with pytest.raises(EnvError, match="no gold answer"):
        await single_turn("\\boxed{72}", Task("How many clips?", ""))


@asynchronous
async def test_the_system_prompt() -> None:
    task = Task([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}], "1")
    assert [m["role"] for m in await MathEnv().reset(TASK)] == ["system", "user"]
    assert "####" in (await MathEnv(answer_format="gsm8k").reset(TASK))[0]["content"]
    assert await MathEnv(system_prompt="").reset(TASK) == [{"role": "user", "content": "How many clips?"}]
    assert (await MathEnv().reset(task))[0]["content"] == "Be brief."


async def with_tools(*replies: Reply) -> tuple[Reward, ScriptedPolicy]:
    policy = ScriptedPolicy(*replies)
    return as_reward(await MathAgent(MathEnv(tools="python")).run(TASK, policy)), policy


@asynchronous
async def test_the_python_tool() -> None:
    reward, policy = await with_tools(calls(("python", {"code": "print(48 + 24)"})), answer("\\boxed{72}"))
    assert (reward.value, reward.parts["tool_calls"]) == (1.0, 1.0)
    assert policy.asked[1][-1] == {"role": "tool", "content": "72", "tool_call_id": "c0", "name": "python"}
    specs = policy.tools[0]
    assert specs is not None and [spec["function"]["name"] for spec in specs] == ["python"]
    assert specs[0]["function"]["parameters"]["properties"]["code"]["type"] == "string"


@asynchronous
async def test_tools_need_an_agent_that_calls_them() -> None:
    with pytest.raises(ValueError, match=r"agent\.loop is SingleTurnAgent.* offers python: .*env\.args\.tools to none"):
        await single_turn("\\boxed{72}", tools="python")


@pytest.mark.parametrize("env", ["MathEnv", "ReasoningGymEnv"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"answer_format": "box"}, r"answer_format is 'box': use .*auto, boxed or gsm8k: see env\.args"),
        ({"answer_format": ["boxed"]}, "answer_format is .* use"),
        ({"verify_timeout": 0}, "verify_timeout is 0: use more than 0 seconds"),
        ({"verify_timeout": "5s"}, "verify_timeout is '5s': use a number"),
        ({"verify_timeout": float("inf")}, "verify_timeout is inf: use a number"),
        ({"verify_timeout": None}, "verify_timeout is None: use a number"),
        ({"format_reward": -1}, "format_reward is -1: use 0 or more"),
        ({"format_reward": True}, "format_reward is True: use a number"),
        ({"system_prompt": 3}, "system_prompt is 3: use a text"),
    ],
)
def test_arguments_that_can_not_work_are_found_out_at_load(env: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError, match=rf"env\.cls: .*: env\.args\.{says}"):
        load_class(f"agentrl.envs.math:{env}", Env, key="env.cls", kwargs=arguments)
    with pytest.raises(ValueError, match=says.partition(": see")[0]):
        getattr(math_envs, env)(**arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tools": "pythn"}, "tools is 'pythn': use none or python"),
        ({"python_timeout": -1}, "python_timeout is -1: use more than 0 seconds"),
    ],
)
def test_arguments_of_the_tools(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"env\.args\.{says}"):
        MathEnv.check_arguments(**arguments)


def test_arguments_that_work() -> None:
    arguments: dict[str, Any] = {"system_prompt": None, "verify_timeout": 3, "format_reward": 0}
    for env in ("MathEnv", "ReasoningGymEnv"):
        assert load_class(f"agentrl.envs.math:{env}", Env, key="env.cls", kwargs=arguments)(**arguments)


async def solve(text: str, task: Task, **arguments: Any) -> Reward:
    return as_reward(await SingleTurnAgent(ReasoningGymEnv(**arguments)).run(task, ScriptedPolicy(answer(text))))


def test_reasoning_gym_tasks_are_determined_by_their_arguments() -> None:
    tasks = reasoning_gym_tasks("leg_counting", size=5, seed=3, max_animals=4)
    assert tasks == reasoning_gym_tasks("leg_counting", size=5, seed=3, max_animals=4)
    assert tasks != reasoning_gym_tasks("leg_counting", size=5, seed=4, max_animals=4)
    with pytest.raises(ValueError, match=r"no data set 'leg_count': did you mean 'leg_counting'\? it has: .*countdown"):
        reasoning_gym_tasks("leg_count")
    with pytest.raises(ValueError, match=r"no data set '\?': it has: .*countdown"):
        reasoning_gym_tasks("?")


@asynchronous
async def test_reasoning_gym_scores() -> None:
    task = reasoning_gym_tasks("leg_counting", size=2, seed=3)[1]
    right = await solve(f"So it is <answer>{task.answer}</answer>.", task)
    assert (right.value, right.parts["accuracy"]) == (1.0, 1.0)
    assert (await solve(f"\\boxed{{{task.answer}}}", task, answer_format="boxed")).value == 1.0
    assert (await solve("<answer>1</answer>", task)).value < 1.0
    assert (await solve("<answer>1", task)).info["outcome"] == "no_answer"
    with pytest.raises(EnvError, match="makes another question"):
        await solve("<answer>1</answer>", Task("Else?", "1", data=task.data))
    with pytest.raises(EnvError, match="no task of reasoning_gym_tasks"):
        await solve("<answer>1</answer>", TASK)
