"""Held-out tasks, played beside the staleness gate."""

from __future__ import annotations

import asyncio
import math
import statistics
import time

from agentrl.record import Fate, Task, TrajectoryWriter
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
        self._rounds = 0

    async def validate(self, version: int) -> ValidationReport:
        """Runs one validation; `version` is the oldest policy that may answer."""
        started = time.perf_counter()
        self._rounds += 1
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
        judged = [o for o in outcomes if o.failure not in (Fate.ENV_ERROR, Fate.ENGINE_ERROR)]
        versions = [branch.trained_versions for t in trajectories for branch in t.branches]
        versions = [v for v in versions if v.size]
        return ValidationReport(
            accuracy=statistics.fmean([bool(o.reward and o.reward.solved) for o in judged] or [math.nan]),
            reward=statistics.fmean([o.reward.value if o.reward else 0.0 for o in judged] or [math.nan]),
            episodes=len(judged),
            failed=len(outcomes) - len(judged),
            version_first=int(min((v.min() for v in versions), default=version)),
            version_last=int(max((v.max() for v in versions), default=version)),
            seconds=time.perf_counter() - started,
        )

    async def _play(self, task: Task, episode_id: str, version: int) -> Outcome:
        async with self._places:
            return await self._runner.play(task, group_id="val", episode_id=episode_id, version=version)
