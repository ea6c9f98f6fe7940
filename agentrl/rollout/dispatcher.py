"""Starts episodes as the gate allows and brings their groups to the buffer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.record import Fate, Group, NoProgress, Task, Trajectory
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.episode import EpisodeRunner, Outcome
from agentrl.rollout.filters import group_fate
from agentrl.rollout.gate import StalenessGate
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.schedule import TaskSchedule
from agentrl.rollout.signal import Signal


@dataclass(frozen=True, slots=True)
class _Plan:
    """A group to be played: a task and the members that have no fate yet.

    Attributes:
        greedy: id of the episode that is played greedily, if one is still to be played.
        played_greedily: that episode, once it was played.
    """

    group_id: str
    task: Task
    members: tuple[str, ...]
    greedy: str | None = None
    played_greedily: Trajectory | None = None

    @property
    def episodes(self) -> tuple[str, ...]:
        """All that are to be played."""
        return self.members if self.greedy is None else (*self.members, self.greedy)


class Dispatcher:
    """One task of the data becomes a group of `group_size` episodes; each ends with exactly one fate.

    An episode that infrastructure spoiled is played again, at most `max_attempts` times in all. A group whose members
    can't all be used trains with the rest; one that is not worth training leaves the gate, and its place is refilled
    with the next task. No episode is started that the gate did not admit.

    Args:
        plays_greedy: play one more episode of each task greedily, not to train it: its reward is the group's baseline.
        needs_baseline, filter_zero_variance: see `filters.group_fate`.
        max_untrainable: so many groups in a row without anything to train end the run.
        filtered: told the outcomes that no batch will hold: of failed members, and of groups not worth training.
        changed: notified whenever the gate's counts change.
    """

    def __init__(
        self,
        schedule: TaskSchedule,
        runner: EpisodeRunner,
        *,
        gate: StalenessGate,
        buffer: Buffer,
        ledger: Ledger,
        changed: Signal,
        group_size: int,
        max_attempts: int,
        plays_greedy: bool,
        needs_baseline: bool,
        filter_zero_variance: bool,
        max_untrainable: int,
        filtered: Callable[[list[Outcome]], None],
    ) -> None:
        self._schedule = schedule
        self._runner = runner
        self._gate = gate
        self._buffer = buffer
        self._ledger = ledger
        self._changed = changed
        self._group_size = group_size
        self._max_attempts = max_attempts
        self._plays_greedy = plays_greedy
        self._needs_baseline = needs_baseline
        self._filter_zero_variance = filter_zero_variance
        self._max_untrainable = max_untrainable
        self._filtered = filtered
        self._numbers = itertools.count()
        self._plans: dict[str, _Plan] = {}
        self._again: deque[_Plan] = deque()
        self._untrainable: Counter[str] = Counter()
        self._untrainable_groups = 0
        self.admitting = True
        self.tasks_left = True

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to start."""
        return not self.tasks_left and not self._again

    async def run(self) -> None:
        """Dispatches until cancelled: when the tasks are used up, there may still be groups to play again.

        Raises:
            NoProgress: group after group ends without anything to train (in an ExceptionGroup).
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._changed.wait_until(
                    lambda: not self.exhausted and self.admitting and self._gate.capacity() > 0
                )
                plan = self._again.popleft() if self._again else self._next_plan()
                if plan is None:
                    self.tasks_left = False
                    self._changed.notify()
                    continue
                version = self._gate.admit(plan.group_id, len(plan.episodes))
                for episode_id in plan.episodes:
                    self._ledger.admitted_again(episode_id, version)
                groups.create_task(self._play_group(plan, version))
                # Much is admitted at once after an update, while the trainer waits for its next batch: one group after
                # the other, with a look at the sockets between them.
                await asyncio.sleep(0)

    def play_again(self, group: Group) -> list[str]:
        """Puts a finished group that came too late back in line, ahead of the next tasks; it has left the gate.

        Returns:
            the members that have used up their attempts, which are not played again.
        """
        plan = self._plans.pop(group.id)
        members = [trajectory.episode_id for trajectory in group.trajectories]
        left = tuple(member for member in members if self._ledger.attempts(member) < self._max_attempts)
        if left:
            self._again.append(_Plan(plan.group_id, plan.task, left, played_greedily=group.greedy))
            self._changed.notify()
        return [member for member in members if member not in left]

    def forget(self, group: Group) -> None:
        """A group has ended for good."""
        self._plans.pop(group.id, None)

    def _next_plan(self) -> _Plan | None:
        task = next(self._schedule, None)
        if task is None:
            return None
        group_id = f"g{next(self._numbers)}"
        members = tuple(f"{group_id}.{member}" for member in range(self._group_size))
        plan = _Plan(group_id, task, members, f"{group_id}.greedy" if self._plays_greedy else None)
        for episode_id in plan.episodes:
            self._ledger.dispatch(episode_id, group_id, task, self._gate.version)
        return plan

    async def _play_group(self, plan: _Plan, version: int) -> None:
        self._plans[plan.group_id] = plan
        async with asyncio.TaskGroup() as episodes:
            playing = {
                episode_id: episodes.create_task(self._play(plan, episode_id, version)) for episode_id in plan.episodes
            }
        outcomes = {episode_id: task.result() for episode_id, task in playing.items()}
        problem = ""
        if plan.greedy is not None:
            greedy = outcomes.pop(plan.greedy)
            self._settle_greedy(plan.greedy, greedy)
            problem = greedy.reason if greedy.failure else "" if greedy.usable else "nothing was sampled"
            plan = replace(plan, played_greedily=greedy.trajectory)
        self._settle(plan, version, outcomes, no_baseline=problem)
        self._changed.notify()

    def _settle_greedy(self, episode_id: str, outcome: Outcome) -> None:
        fate, reason = outcome.failure or Fate.FILTERED, outcome.reason or "greedy, the baseline of its group"
        self._ledger.seal(episode_id, fate, reason, self._gate.version)

    async def _play(self, plan: _Plan, episode_id: str, version: int) -> Outcome:
        try:
            outcome = await self._runner.play_until_judged(
                plan.task,
                group_id=plan.group_id,
                episode_id=episode_id,
                version=version,
                next_attempt=lambda: self._ledger.attempt(episode_id),
                greedy=episode_id == plan.greedy,
            )
        finally:
            self._gate.episode_ended(plan.group_id)
            self._changed.notify()
        self._ledger.ended(episode_id, outcome)
        return outcome

    def _settle(self, plan: _Plan, version: int, outcomes: dict[str, Outcome], *, no_baseline: str) -> None:
        now = self._gate.version
        for episode_id, outcome in outcomes.items():
            if outcome.failure is not None:
                self._ledger.seal(episode_id, outcome.failure, outcome.reason, now)
        self._schedule.observe(plan.task, [o.reward.value for o in outcomes.values() if o.reward is not None])
        usable = {episode_id: outcome for episode_id, outcome in outcomes.items() if outcome.usable}
        verdict = group_fate(
            list(outcomes.values()),
            needs_baseline=self._needs_baseline,
            filter_zero_variance=self._filter_zero_variance,
        )
        if verdict is None and no_baseline:
            verdict = Fate.GROUP_INCOMPLETE, f"without a baseline, since its greedy episode failed: {no_baseline}"
        if verdict is None:
            self._filtered([outcome for outcome in outcomes.values() if not outcome.usable])
            trajectories = [outcome.trajectory for outcome in usable.values() if outcome.trajectory is not None]
            self._buffer.put(Group(plan.group_id, trajectories, version, plan.played_greedily))
            self._untrainable.clear()
            self._untrainable_groups = 0
            return
        self._filtered(list(outcomes.values()))
        del self._plans[plan.group_id]
        fate, reason = verdict
        for episode_id in usable:
            self._ledger.seal(episode_id, fate, reason, now)
        self._gate.removed(plan.group_id)
        self._count_untrainable([outcome.reason or reason for outcome in outcomes.values()])

    def _count_untrainable(self, reasons: list[str]) -> None:
        self._untrainable.update(reasons)
        self._untrainable_groups += 1
        if self._untrainable_groups >= self._max_untrainable:
            common = "; ".join(f"{count} episodes: {reason}" for reason, count in self._untrainable.most_common(3))
            raise NoProgress(f"the last {self._untrainable_groups} groups had nothing to train: {common}")
