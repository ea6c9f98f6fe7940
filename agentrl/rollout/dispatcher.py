"""Starts episodes as the gate allows and brings their groups to the buffer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from agentrl.record import Group, NoProgress, Task
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.episode import EpisodeRunner, Outcome
from agentrl.rollout.filters import group_fate
from agentrl.rollout.gate import StalenessGate
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.signal import Signal


class Dispatcher:
    """One task of the data becomes a group of `group_size` episodes; each ends with exactly one fate.

    A group whose members can't all be used trains with the rest; one that is not worth training leaves the gate, and
    its place is refilled with the next task. No episode is started that the gate did not admit.

    Args:
        needs_baseline, filter_zero_variance: see `filters.group_fate`.
        max_untrainable: so many groups in a row without anything to train end the run.
        filtered: told the outcomes that no batch will hold: of failed members, and of groups not worth training.
        changed: notified whenever the gate's counts change.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        runner: EpisodeRunner,
        *,
        gate: StalenessGate,
        buffer: Buffer,
        ledger: Ledger,
        changed: Signal,
        group_size: int,
        needs_baseline: bool,
        filter_zero_variance: bool,
        max_untrainable: int,
        filtered: Callable[[list[Outcome]], None],
    ) -> None:
        self._tasks = tasks
        self._runner = runner
        self._gate = gate
        self._buffer = buffer
        self._ledger = ledger
        self._changed = changed
        self._group_size = group_size
        self._needs_baseline = needs_baseline
        self._filter_zero_variance = filter_zero_variance
        self._max_untrainable = max_untrainable
        self._filtered = filtered
        self._untrainable: Counter[str] = Counter()
        self._untrainable_groups = 0
        self.admitting = True
        self.exhausted = False

    async def run(self) -> None:
        """Dispatches until the tasks are used up and the last group has ended.

        Raises:
            NoProgress: group after group ends without anything to train (in an ExceptionGroup).
        """
        async with asyncio.TaskGroup() as groups:
            for number in itertools.count():
                await self._changed.wait_until(lambda: self.admitting and self._gate.capacity() > 0)
                task = next(self._tasks, None)
                if task is None:
                    break
                group_id = f"g{number}"
                version = self._gate.admit(group_id)
                members = [f"{group_id}.{member}" for member in range(self._group_size)]
                for episode_id in members:
                    self._ledger.dispatch(episode_id, group_id, task, version)
                groups.create_task(self._play_group(task, group_id, members, version))
            self.exhausted = True
            self._changed.notify()

    async def _play_group(self, task: Task, group_id: str, members: list[str], version: int) -> None:
        async with asyncio.TaskGroup() as episodes:
            playing = [episodes.create_task(self._play(task, group_id, episode_id, version)) for episode_id in members]
        self._settle(group_id, version, dict(zip(members, (task.result() for task in playing), strict=True)))
        self._changed.notify()

    async def _play(self, task: Task, group_id: str, episode_id: str, version: int) -> Outcome:
        try:
            outcome = await self._runner.play(task, group_id=group_id, episode_id=episode_id, version=version)
        finally:
            self._gate.episode_ended()
            self._changed.notify()
        self._ledger.ended(episode_id, outcome)
        return outcome

    def _settle(self, group_id: str, version: int, outcomes: dict[str, Outcome]) -> None:
        now = self._gate.version
        for episode_id, outcome in outcomes.items():
            if outcome.failure is not None:
                self._ledger.seal(episode_id, outcome.failure, outcome.reason, now)
        usable = {episode_id: outcome for episode_id, outcome in outcomes.items() if outcome.usable}
        verdict = group_fate(
            list(outcomes.values()),
            needs_baseline=self._needs_baseline,
            filter_zero_variance=self._filter_zero_variance,
        )
        if verdict is None:
            self._filtered([outcome for outcome in outcomes.values() if not outcome.usable])
            trajectories = [outcome.trajectory for outcome in usable.values() if outcome.trajectory is not None]
            self._buffer.put(Group(group_id, trajectories, version))
            self._untrainable.clear()
            self._untrainable_groups = 0
            return
        self._filtered(list(outcomes.values()))
        fate, reason = verdict
        for episode_id in usable:
            self._ledger.seal(episode_id, fate, reason, now)
        self._gate.removed(group_id)
        self._count_untrainable([outcome.reason or reason for outcome in outcomes.values()])

    def _count_untrainable(self, reasons: list[str]) -> None:
        self._untrainable.update(reasons)
        self._untrainable_groups += 1
        if self._untrainable_groups >= self._max_untrainable:
            common = "; ".join(f"{count} episodes: {reason}" for reason, count in self._untrainable.most_common(3))
            raise NoProgress(f"the last {self._untrainable_groups} groups had nothing to train: {common}")
