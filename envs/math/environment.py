"""Mathematical problems with one right answer, judged by equality; with a Python interpreter if wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl.envs.math.answers import AnswerFormat, final_answer, gold_answer
from agentrl.envs.math.python_tool import Request, described, run_python
from agentrl.envs.math.verify import Outcome, Verdict, Verifier
from agentrl.record import Message, Task
from agentrl.sdk import Env, Reward, Transcript, tool
from agentrl.sdk.prompts import with_system_prompt
from agentrl.sdk.tool import BoundTool

_SHOWN = 200
"""Most characters of an answer that go into a reward's info."""

_SYSTEM_PROMPTS: dict[AnswerFormat, str] = {
    "auto": "Solve the problem step by step. Put the final answer in \\boxed{}.",
    "boxed": "Solve the problem step by step. Put the final answer in \\boxed{}.",
    "gsm8k": "Solve the problem step by step. End with a line that holds #### and the final answer.",
}


class MathEnv(Env):
    r"""Problems whose answer is a number, an expression, a set, a word, ...: reward 1 if it equals the gold answer.

    The gold answer is taken from `task.answer`, which may be a GSM8K rationale (`#### 72`), a solution with a
    `\boxed{}`, or the answer itself.

    Args:
        tools: `python` lets the model run programs; that needs a multi-turn agent such as `MathAgent`.
        answer_format: where the model's answer stands: in the last `\boxed{}`, after `####`, or in either (`auto`).
        system_prompt: the first message; default: one that asks for that format. Empty: none.
        format_reward: earned for giving any answer in that format, on top of the 1 for a right one.
        verify_timeout: seconds the judging of one answer may take; one that takes longer is worth nothing.
        python_timeout: seconds a program of the model may run.
    """

    def __init__(
        self,
        *,
        tools: Literal["none", "python"] = "none",
        answer_format: AnswerFormat = "auto",
        system_prompt: str | None = None,
        format_reward: float = 0.0,
        verify_timeout: float = 5.0,
        python_timeout: float = 5.0,
    ) -> None:
        self.check_arguments(
            tools=tools,
            answer_format=answer_format,
            system_prompt=system_prompt,
            format_reward=format_reward,
            verify_timeout=verify_timeout,
            python_timeout=python_timeout,
        )
        self._tools = tools
        self._format: AnswerFormat = answer_format
        self._system_prompt = _SYSTEM_PROMPTS[answer_format] if system_prompt is None else system_prompt
        self._format_reward = format_reward
        self._verifier = Verifier(verify_timeout)
        self._python_seconds = python_timeout

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        check_arguments(arguments, {"tools": ("none", "python"), "answer_format": tuple(_SYSTEM_PROMPTS)})

    async def reset(self, task: Task) -> list[Message]:
        return with_system_prompt(self._system_prompt, task)

    def tools(self) -> dict[str, BoundTool]:
        return {} if self._tools == "none" else super().tools()

    @tool
    async def python(self, code: str) -> str:
        """Runs a Python program and shows what it prints. Nothing is kept between calls.

        Args:
            code: the whole program; print what you want to see.
        """
        report = await run_python(Request(code, seconds=self._python_seconds))
        return described(report, self._python_seconds)

    async def score(self, transcript: Transcript) -> Reward:
        gold = gold_answer(transcript.task.answer)
        answer = final_answer(transcript.answer, self._format)
        verdict = await self._verifier.verify(gold, answer)
        return verdict_reward(verdict, transcript, self._format_reward, gold=gold[:_SHOWN], answer=answer)


def check_arguments(arguments: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> None:
    """Checks arguments of the environments here: those with a choice of values, the timeouts, rewards and prompts.

    Raises:
        ValueError: one of them can't work.
    """
    for name, value in arguments.items():
        wanted = ""
        if name in choices:
            *others, last = choices[name]
            wanted = "" if value in choices[name] else f"{', '.join(others)} or {last}"
        elif name == "system_prompt":
            wanted = "" if value is None or isinstance(value, str) else "a text"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            wanted = "a number"
        elif name.endswith("_timeout"):
            wanted = "" if value > 0 else "more than 0 seconds"
        else:
            wanted = "" if value >= 0 else "0 or more"
        if wanted:
            raise ValueError(f"env.args.{name} is {value!r}: use {wanted}")


def verdict_reward(
    verdict: Verdict, transcript: Transcript, format_reward: float, *, answer: str | None, **info: Any
) -> Reward:
    """A verdict as a reward; what went wrong in the judging is counted apart from wrong answers."""
    answered = float(verdict.outcome is not Outcome.NO_ANSWER)
    return Reward(
        verdict.score + format_reward * answered,
        parts={
            "accuracy": verdict.score,
            "has_answer": answered,
            "verify_timeout": float(verdict.outcome is Outcome.TIMEOUT),
            "verify_error": float(verdict.outcome is Outcome.ERROR),
            "tool_calls": float(sum(len(reply.tool_calls) for reply in transcript.replies)),
        },
        info={
            "outcome": verdict.outcome.value,
            "answer": None if answer is None else answer[:_SHOWN],
            **({"detail": verdict.detail} if verdict.detail else {}),
            **info,
        },
    )
