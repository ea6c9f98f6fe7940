"""Mathematical environments with the agents that play them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.agents.math import MathAgent, SingleTurnAgent
from agentrl.envs.math import MathEnv, ReasoningGymEnv, reasoning_gym_tasks
from agentrl.record import EnvError, Reply, Task
from agentrl.sdk import Reward
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


def test_wrong_arguments_say_what_is_possible() -> None:
    with pytest.raises(ValueError, match=r"env\.args\.tools is 'bash': use none or python"):
        MathEnv(tools="bash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"env\.args\.answer_format is 'xml': use auto, boxed, gsm8k"):
        MathEnv(answer_format="xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"env\.args\.answer_format is 'xml': use tags"):
        ReasoningGymEnv(answer_format="xml")


async def solve(text: str, task: Task, **arguments: Any) -> Reward:
    return as_reward(await SingleTurnAgent(ReasoningGymEnv(**arguments)).run(task, ScriptedPolicy(answer(text))))


def test_reasoning_gym_tasks_are_determined_by_their_arguments() -> None:
    tasks = reasoning_gym_tasks("leg_counting", size=5, seed=3, max_animals=4)
    assert tasks == reasoning_gym_tasks("leg_counting", size=5, seed=3, max_animals=4)
    assert tasks != reasoning_gym_tasks("leg_counting", size=5, seed=4, max_animals=4)
    with pytest.raises(ValueError, match=r"no data set 'legs'; it has: .*leg_counting"):
        reasoning_gym_tasks("legs")


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


@asynchronous
async def test_answers_are_not_run_as_programs() -> None:
    task = reasoning_gym_tasks("spiral_matrix", size=1, seed=3)[0]
    assert (await solve(f"<answer>{task.answer}</answer>", task)).value == 1.0
    cheat = f"[print(), *{str(task.answer).split()!r}]"
    assert (await solve(f"<answer>{cheat}</answer>", task)).value < 1.0
