"""Held-out tasks played without any training: what `agentrl eval` measures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.record import Task, TrajectoryWriter
from agentrl.record.protocols import Engine, EvaluatedTask, EvaluationReport, EvaluationStatus
from agentrl.rollout.episode import EpisodeRunner, Outcome, Plugins
from agentrl.rollout.outside import open_gateway
from agentrl.rollout.router import Router
from agentrl.rollout.signal import Signal
from agentrl.session import ChatFormat


class Evaluator:
    """Plays each task `val.n` times. Implements `record.protocols.EvaluationService`.

    An episode that infrastructure spoiled is played again, at most `rollout.max_attempts` times; what is then still
    without a judgement is left out and counted. Agent errors, time-outs and overflows are failures of the policy.

    Args:
        plugins: by environment.
        engines: by name.
        run_dir: where trajectories are written.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        *,
        chat_format: ChatFormat,
        plugins: Mapping[str, Plugins],
        engines: Mapping[str, Engine],
        run_dir: Path,
    ) -> None:
        router = Router(engines, Signal())
        self._config = config
        self._tasks = tasks
        self._gateway, outside = open_gateway(config, over=lambda: "")
        self._runner = EpisodeRunner(
            config, plugins, chat_format, router, router.forget, door=self._gateway, outside=outside
        )
        self._places = asyncio.Semaphore(config.rollout.max_concurrent)
        self._writer = TrajectoryWriter(run_dir / "trajectories", "eval")
        self._writing = asyncio.Lock()
        self._done = self._solved = self._tokens = 0

    async def evaluate(self) -> EvaluationReport:
        serving = asyncio.ensure_future(self._gateway.run())
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._play_task(task)) for task in self._tasks]
        finally:
            serving.cancel()
            await asyncio.wait({serving})
        return EvaluationReport(tasks=[task.result() for task in playing], generated_tokens=self._tokens)

    async def status(self) -> EvaluationStatus:
        return EvaluationStatus(self._done, len(self._tasks) * self._config.val.n, self._solved)

    async def _play_task(self, task: Task) -> EvaluatedTask:
        async with asyncio.TaskGroup() as group:
            samples = [
                group.create_task(self._play(task, f"e{task.index}.{repeat}")) for repeat in range(self._config.val.n)
            ]
        outcomes = [sample.result() for sample in samples]
        judged = [outcome for outcome in outcomes if not outcome.spoiled]
        return EvaluatedTask(
            environment=task.environment,
            task_id=task.id,
            judged=len(judged),
            solved=sum(outcome.solved for outcome in judged),
            rewards=[outcome.reward.value if outcome.reward else 0.0 for outcome in judged],
            turns=[outcome.trajectory.turns if outcome.trajectory else 0 for outcome in judged],
            failures=dict(Counter(outcome.failure.value for outcome in outcomes if outcome.failure is not None)),
        )

    async def _play(self, task: Task, episode_id: str) -> Outcome:
        async with self._places:
            outcome = await self._runner.play_until_judged(
                task, group_id="eval", episode_id=episode_id, version=0, next_attempt=count(1).__next__
            )
        self._done += 1
        self._solved += outcome.solved
        if outcome.trajectory is not None:
            self._tokens += outcome.trajectory.sampled_tokens
            async with self._writing:
                await asyncio.to_thread(self._writer.append, [outcome.trajectory])
        return outcome
