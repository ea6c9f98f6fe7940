"""Whether a mathematical answer is right, within a time limit and without ever stopping the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from agentrl.envs.math.answers import MAX_ANSWER_LENGTH
from agentrl.envs.math.judge_pool import JudgePool, shared_pool
from agentrl.envs.math.plain import quick_verdict
from agentrl.record import EnvError


class Outcome(StrEnum):
    """What became of the judging of an answer."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_ANSWER = "no_answer"
    """The model gave none."""
    TIMEOUT = "timeout"
    """It could not be judged within the limit: a bomb such as `9999999!`. Worth nothing."""
    ERROR = "error"
    """The verifier failed at it: too deep, too large for its memory, or it died twice. Worth nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one answer.

    Attributes:
        score: 1.0 or 0.0; what lies between only data sets of reasoning-gym give.
        detail: the reason, where the outcome does not say it.
    """

    outcome: Outcome
    score: float = 0.0
    detail: str = ""

    @classmethod
    def from_worker(cls, result: dict[str, object]) -> Verdict:
        """What a worker found."""
        outcome = Outcome(str(result["outcome"]))
        score = float(str(result.get("score", float(outcome is Outcome.EQUAL))))
        return cls(outcome, score, str(result.get("detail", "")))


class Verifier:
    """Compares answers with gold answers. Usable from any event loop and thread; the workers are the process's.

    Args:
        limit: seconds an answer may take, from when a worker takes it up.
        kind: of answers; see `judge_worker.JUDGES`.
        pool: of workers; default: the one of this process.
    """

    def __init__(self, limit: float = 5.0, *, kind: str = "math", pool: JudgePool | None = None) -> None:
        if limit <= 0:
            raise ValueError(f"the limit is {limit} s: use more than 0")
        self.limit = limit
        self._kind = kind
        self._pool = pool

    async def verify(self, gold: str, answer: str | None) -> Verdict:
        r"""Judges an answer, as taken out of its `\boxed{}`.

        Raises:
            EnvError: nobody can judge it: the gold answer can't be read or evaluated, or no worker starts.
        """
        if not answer:
            return Verdict(Outcome.NO_ANSWER)
        if len(gold) > MAX_ANSWER_LENGTH:
            raise EnvError(f"the gold answer has {len(gold)} characters: use at most {MAX_ANSWER_LENGTH}")
        if len(answer) > MAX_ANSWER_LENGTH:
            return Verdict(Outcome.DIFFERENT, detail=f"longer than {MAX_ANSWER_LENGTH} characters")
        same = quick_verdict(gold, answer)
        if same is not None:
            return Verdict(Outcome.EQUAL, 1.0) if same else Verdict(Outcome.DIFFERENT)
        return await self.ask({"gold": gold, "answer": answer})

    async def ask(self, arguments: dict[str, object]) -> Verdict:
        """Has the workers judge an answer, given what a judge of this kind takes. Errors as in `verify`."""
        pool = self._pool or shared_pool(self._kind)
        return Verdict.from_worker(await asyncio.wrap_future(pool.submit(arguments, self.limit)))
