"""Held-out tasks, played beside the staleness gate."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from itertools import count

from agentrl.record import Task, TrajectoryWriter
from agentrl.record.protocols import ValidationReport
from agentrl.rollout.episode import EpisodeRunner, Outcome


class Validator:
    """Plays every held-out task `repeats` times, at most `max_concurrent` at once.

    Judged episodes make the means. What the agent's own code spoiled counts as a failure of the policy, reward 0;
    what infrastructure spoiled is left out and counted.
    """

    def __init__(
        self,
        tasks: list[Task],
        runner: EpisodeRunner,
        *,
        repeats: int,
        max_concurrent: int,
        writer: TrajectoryWriter | None,
    ) -> None:
        self._tasks = tasks
        self._runner = runner
        self._repeats = repeats
        self._places = asyncio.Semaphore(max_concurrent)
        self._writer = writer
        self._rounds = self._missing = 0

    async def validate(self, version: int) -> ValidationReport:
        """Runs one validation; `version` is the oldest policy that may answer."""
        started = time.perf_counter()
        self._rounds += 1
        self._missing = len(self._tasks) * self._repeats
        async with asyncio.TaskGroup() as group:
            playing = [
                group.create_task(self._play(task, f"v{self._rounds}.{task.index}.{repeat}", version))
                for task in self._tasks
                for repeat in range(self._repeats)
            ]
        outcomes = [task.result() for task in playing]
        trajectories = [outcome.trajectory for outcome in outcomes if outcome.trajectory is not None]
        if self._writer is not None:
            await asyncio.to_thread(self._writer.append, trajectories)
        judged = [outcome for outcome in outcomes if not outcome.spoiled]
        versions = [branch.trained_versions for t in trajectories for branch in t.branches]
        versions = [v for v in versions if v.size]
        by_environment: dict[str, list[Outcome]] = {}
        for index, outcome in enumerate(outcomes):
            if not outcome.spoiled:
                by_environment.setdefault(self._tasks[index // self._repeats].environment, []).append(outcome)
        return ValidationReport(
            accuracy=_accuracy(judged),
            reward=statistics.fmean([o.reward.value if o.reward else 0.0 for o in judged] or [math.nan]),
            episodes=len(judged),
            failed=len(outcomes) - len(judged),
            version_first=int(min((v.min() for v in versions), default=version)),
            version_last=int(max((v.max() for v in versions), default=version)),
            seconds=time.perf_counter() - started,
            accuracies={name: _accuracy(own) for name, own in by_environment.items()},
        )

    def describe(self) -> str:
        """How far the validation in progress is."""
        return f"{self._missing} of {len(self._tasks) * self._repeats} are left"

    async def _play(self, task: Task, episode_id: str, version: int) -> Outcome:
        async with self._places:
            outcome = await self._runner.play_until_judged(
                task, group_id="val", episode_id=episode_id, version=version, next_attempt=count(1).__next__
            )
        self._missing -= 1
        return outcome


def _accuracy(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean([o.solved for o in outcomes] or [math.nan])
