r"""The generated puzzles of the package reasoning-gym: over a hundred kinds, each with its own way of scoring."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from agentrl.envs.math.answers import AnswerFormat, final_answer
from agentrl.envs.math.environment import check_arguments, verdict_reward
from agentrl.envs.math.verify import Outcome, Verdict, Verifier
from agentrl.record import EnvError, Message, Task
from agentrl.sdk import Env, Reward, Transcript
from agentrl.sdk.prompts import with_system_prompt

_SYSTEM_PROMPT = "Solve the problem step by step. Put the final answer, in the format asked for, in <answer></answer>."
_MAX_ANSWER_LENGTH = 20_000


def reasoning_gym_tasks(dataset: str, size: int = 1000, seed: int = 0, **config: Any) -> list[Task]:
    """Tasks of one data set of reasoning-gym; the same arguments and package give the same tasks.

    Args:
        dataset: its name, such as `leg_counting` or `countdown`.
        size: how many.
        config: keyword arguments of the data set, such as `max_animals`.

    Raises:
        ImportError: the package is missing.
        ValueError: no such data set.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("reasoning-gym is not installed: run `pip install 'agentrl[math]'`") from error
    if dataset not in DATASETS:
        near = get_close_matches(str(dataset), DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"reasoning-gym has no data set {dataset!r}: {hint}it has: {', '.join(sorted(DATASETS))}")
    config = json.loads(json.dumps(config))  # as it will come back from the task's record
    source = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
    origin = {"dataset": dataset, "seed": seed, "size": size, "config": config}
    return [
        Task(entry["question"], str(entry["answer"]), data={"reasoning_gym": {**origin, "index": index}})
        for index, entry in enumerate(source[position] for position in range(size))
    ]


class ReasoningGymEnv(Env):
    """Tasks of `reasoning_gym_tasks`, scored between 0 and 1 by the data set they come from.

    Args:
        answer_format: `tags` reads `<answer></answer>`; the others are those of `MathEnv`.
        system_prompt: the first message; default: one that asks for the answer in tags. Empty: none.
        verify_timeout: seconds the scoring of one answer may take; one that takes longer is worth nothing.
    """

    def __init__(
        self,
        *,
        answer_format: AnswerFormat | str = "tags",
        system_prompt: str | None = None,
        format_reward: float = 0.0,
        verify_timeout: float = 5.0,
    ) -> None:
        self.check_arguments(
            answer_format=answer_format,
            system_prompt=system_prompt,
            format_reward=format_reward,
            verify_timeout=verify_timeout,
        )
        self._format = answer_format
        self._system_prompt = _SYSTEM_PROMPT if system_prompt is None else system_prompt
        self._format_reward = format_reward
        self._verifier = Verifier(verify_timeout, kind="reasoning_gym")

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        check_arguments(arguments, {"answer_format": ("tags", "auto", "boxed", "gsm8k")})

    async def reset(self, task: Task) -> list[Message]:
        return with_system_prompt(self._system_prompt, task)

    async def score(self, transcript: Transcript) -> Reward:
        task = transcript.task
        origin = task.data.get("reasoning_gym")
        if not isinstance(origin, dict) or not isinstance(task.prompt, str):
            raise EnvError("this is no task of reasoning_gym_tasks: set data.train to that function")
        answer = self._answer(transcript.answer)
        verdict = Verdict(Outcome.NO_ANSWER)
        if answer is not None and len(answer) > _MAX_ANSWER_LENGTH:
            verdict = Verdict(Outcome.DIFFERENT, detail=f"longer than {_MAX_ANSWER_LENGTH} characters")
        elif answer is not None:
            verdict = await self._verifier.ask({**origin, "question": task.prompt, "answer": answer})
        return verdict_reward(verdict, transcript, self._format_reward, answer=answer)

    def _answer(self, text: str) -> str | None:
        if self._format != "tags":
            return final_answer(text, self._format)  # pyright: ignore[reportArgumentType]  # checked when built
        _, tag, rest = text.rpartition("<answer>")
        answer, end, _ = rest.partition("</answer>")
        return answer.strip() or None if tag and end else None
