"""Mathematics: problems with a checkable answer."""

from __future__ import annotations

from typing import Literal

from agentrl.envs.math.answers import final_answer, gold_answer
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate, generate_problems, score_answer
from agentrl.envs.math.environment import MathEnv
from agentrl.envs.math.reasoning import ReasoningGymEnv, reasoning_gym_tasks
from agentrl.envs.math.verify import Outcome, Verdict, Verifier
from agentrl.record import Message, Task
from agentrl.sdk import Env, Reward, ToolError, Transcript, tool

__all__ = [
    "ArithmeticEnv",
    "MathEnv",
    "Outcome",
    "ReasoningGymEnv",
    "Verdict",
    "Verifier",
    "arithmetic_tasks",
    "final_answer",
    "gold_answer",
    "reasoning_gym_tasks",
]


def arithmetic_tasks(
    split: Literal["train", "test", "test_paraphrase"] = "train", count: int = 4096, seed: int = 0
) -> list[Task]:
    """Generated problems such as `What is 417 * 68?`; those of `test` never occur in `train`."""
    return [
        Task(problem.question, problem.answer, data={"operator": problem.operator})
        for problem in generate_problems(split, count, seed)
    ]


class ArithmeticEnv(Env):
    """Arithmetic with a calculator at hand; reward 1 for exactly the right number in the last `\\boxed{}`."""

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, *task.messages()]

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression."""
        try:
            return calculate(expression)
        except ValueError as error:
            raise ToolError(str(error)) from None

    async def score(self, transcript: Transcript) -> Reward:
        value = score_answer(transcript.answer, str(transcript.task.answer))
        calls = sum(len(reply.tool_calls) for reply in transcript.replies)
        return Reward(value, parts={"accuracy": value, "tool_calls": float(calls)})
