"""The staleness gate: its numbers, and random schedules of the state machine that gate and buffer make."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.record import Group
from agentrl.rollout import Buffer, StalenessGate


def gate(
    batch: int,
    sync: int = 1,
    eta: str = "0",
    *,
    max_lag: int | None = None,
    n: int = 1,
    concurrent: int = 10**6,
    version: int = 0,
) -> StalenessGate:
    return StalenessGate(
        batch_groups=batch,
        sync_steps=sync,
        eta=Fraction(eta),
        max_lag=ceil(Fraction(eta)) if max_lag is None else max_lag,
        group_size=n,
        max_concurrent=concurrent,
        version=version,
    )


@pytest.mark.parametrize(
    ("fresh", "capacity"),
    [
        (gate(8, 1, "2", version=100), 24),
        (gate(100, 1, "0.15"), 115),
        (gate(50, 2, "0.15"), 115),
        (gate(4, 1, "0"), 4),
        (gate(4, 4, "0"), 16),
        (gate(4, 1, "0.5"), 6),
        (gate(1, 1, "0.9"), 1),
        (gate(4, 1, "1", n=8, concurrent=20), 2),
        (gate(4, 1, "1", n=8, concurrent=8), 1),
    ],
    ids=["after a resume", "fractions", "T = 2", "eta 0", "T 4", "eta 0.5", "rounded down", "by episodes", "one group"],
)
def test_the_capacity_of_an_idle_gate(fresh: StalenessGate, capacity: int) -> None:
    assert fresh.capacity() == capacity


def test_with_eta_one_half_six_start_at_first_and_four_per_version_after() -> None:
    subject = gate(4, 1, "0.5")
    buffer = Buffer(subject, batch_groups=4, on_stale="wait")
    admitted = []
    for version in range(5):
        if version:
            subject.published(version)
        started = [f"{version}.{i}" for i in range(subject.capacity())]
        for group_id in started:
            subject.admit(group_id)
            subject.episode_ended(group_id)
            buffer.put(Group(group_id, [], version))
        admitted.append(len(started))
        assert buffer.take() is not None
    assert admitted == [6, 4, 4, 4, 4]


def test_a_closed_gate_admits_nobody() -> None:
    subject = gate(1)
    assert subject.admit("a") == 0
    assert subject.capacity() == 0
    with pytest.raises(RuntimeError, match="the gate is closed"):
        subject.admit("b")


def test_a_group_that_leaves_gives_its_place_back_and_one_that_is_taken_does_not() -> None:
    subject = gate(1, 2)
    subject.admit("a")
    subject.admit("b")
    subject.removed("a")
    assert subject.capacity() == 1
    subject.finished("b", 0)
    subject.taken(["b"])
    assert (subject.capacity(), subject.taken_groups) == (1, 1)
    subject.published(1)
    assert subject.capacity() == 2


def test_running_and_queued_groups_are_told_apart() -> None:
    subject = gate(2, 1, "1", version=3)
    for group_id in "abc":
        subject.admit(group_id)
    subject.finished("b", 2)
    assert (subject.running_groups, subject.queued_groups, subject.oldest) == (2, 1, 2)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_versions_never_go_back(version: int) -> None:
    with pytest.raises(ValueError, match="versions never go back"):
        gate(1, version=4).published(version)


def test_lag_exactly_at_the_bound_trains_and_one_more_is_stale() -> None:
    """Case 18: a sample of version 1, a bound of 8."""
    subject = gate(1, 1, "8", version=9)
    assert (subject.lag(1), subject.is_stale(1)) == (8, False)
    subject.published(10)
    assert (subject.lag(1), subject.is_stale(1)) == (9, True)


@dataclass
class Schedule:
    """Everything random about a run of the state machine."""

    batch: int
    sync: int
    eta: Fraction
    max_lag: int
    n: int
    concurrent: int
    seed: int

    def gate(self) -> StalenessGate:
        return gate(self.batch, self.sync, str(self.eta), max_lag=self.max_lag, n=self.n, concurrent=self.concurrent)


ETAS = st.sampled_from(["0", "0.15", "1/3", "0.5", "0.9", "1", "1.5", "2", "2.25", "3"]).map(Fraction)
SCHEDULES = st.tuples(
    st.integers(1, 5), st.integers(1, 4), ETAS, st.integers(0, 2), st.integers(1, 3), st.integers(0, 30),
    st.integers(0, 2**32),
).map(
    lambda drawn: Schedule(
        drawn[0], drawn[1], drawn[2], ceil(drawn[2]) + drawn[3], drawn[4], drawn[4] + drawn[5], drawn[6]
    )
)  # fmt: skip


class Machine:
    """Gate and buffer under an adversary: who finishes when, how old its tokens are, and when anything happens."""

    def __init__(self, schedule: Schedule, on_stale: str) -> None:
        self.schedule = schedule
        self.random = random.Random(schedule.seed)
        self.gate = schedule.gate()
        self.buffer = Buffer(self.gate, batch_groups=schedule.batch, on_stale=on_stale)  # type: ignore[arg-type]
        self.limit = floor(schedule.batch * schedule.sync * (1 + schedule.eta))
        self.running: dict[str, int] = {}
        self.finished: set[str] = set()
        self.number = self.steps = 0
        self.stale: set[str] = set()
        self.trained: set[str] = set()
        # An adversary has habits: whom it starves, how often groups fail, how patient it is.
        self.starves = self.random.choice(["old versions", "all but the newest", "new versions", "nobody"])
        self.failure_rate = self.random.choice([0, 0.1, 0.6])
        self.soft = self.random.random() < 0.5
        self.partial = self.random.random() < 0.5
        self.eager = self.random.random()
        self.early = 0.0

    def check(self) -> None:
        gate, schedule = self.gate, self.schedule
        live = len(self.running) + len(self.buffer)
        assert live + gate.taken_groups <= self.limit
        assert gate.running_episodes == len(self.running) * schedule.n <= schedule.concurrent
        by_episodes = (schedule.concurrent - gate.running_episodes) // schedule.n
        assert gate.capacity() == min(by_episodes, self.limit - live - gate.taken_groups) >= 0
        assert self.finished == self.trained | self.stale | {group.id for group in self.groups()}

    def groups(self) -> list[Group]:
        return list(self.buffer._groups.values())

    def admit(self) -> None:
        self.number += 1
        group_id = f"g{self.number}"
        self.running[group_id] = self.gate.admit(group_id)

    def spared(self) -> list[str]:
        """Whom the adversary does not starve."""
        versions = self.running.values()
        return {
            "old versions": [key for key, version in self.running.items() if version > min(versions)],
            "all but the newest": list(self.running)[-1:],
            "new versions": [key for key, version in self.running.items() if version < max(versions)],
            "nobody": list(self.running),
        }[self.starves]

    def end_one(self) -> None:
        group_id = self.random.choice(self.spared() or list(self.running))
        admitted = self.running.pop(group_id)
        for _ in range(self.schedule.n):
            self.gate.episode_ended(group_id)
        if self.random.random() < self.failure_rate:
            self.gate.removed(group_id)
            return
        # Any token may come from any version between admission and the end; what counts is the oldest.
        oldest = self.random.randint(admitted, self.gate.version) if self.partial else admitted
        self.buffer.put(aged(group_id, admitted, oldest))
        self.finished.add(group_id)

    def take(self) -> bool:
        if self.gate.batches_taken == self.schedule.sync:
            return False
        self.stale |= {group.id for group in self.buffer.drop_stale()}
        batch = self.buffer.take()
        if batch is None:
            return False
        for group in batch:
            assert self.gate.version - group.oldest_version <= self.schedule.max_lag
        self.trained |= {group.id for group in batch}
        self.steps += 1
        return True

    def publish_if_due(self) -> None:
        due = self.gate.batches_taken == self.schedule.sync
        if due or (self.gate.batches_taken and self.random.random() < self.early):
            self.gate.published(self.gate.version + 1)

    def step(self) -> None:
        """Something happens that may happen."""
        choice = self.random.random()
        if choice < 0.4 and self.gate.capacity():
            self.admit()
        elif choice < 0.7 and self.random.random() < self.eager and (self.running if self.soft else self.spared()):
            self.end_one()
        elif choice < 0.9:
            self.take()
        else:
            self.publish_if_due()

    def must_go_on(self) -> None:
        """However it stands, letting everything that can happen happen leads to another training step."""
        before = self.steps
        self.failure_rate = 0
        for _ in range(100 * self.limit):
            self.publish_if_due()
            while self.gate.capacity():
                self.admit()
            self.take()
            self.check()
            if self.steps > before:
                return
            assert self.running or self.gate.capacity(), "deadlock: nothing runs, nothing may start, no batch forms"
            if self.running:
                self.end_one()
        raise AssertionError("no training step although everything that started has ended")


def aged(group_id: str, admitted: int, oldest: int) -> Group:
    """A finished group whose oldest trained token has a version of `oldest`."""
    group = Group(group_id, [], oldest)
    assert group.oldest_version == oldest >= admitted
    return group


def random_schedule(schedule: Schedule, on_stale: str, early: float = 0.0) -> Machine:
    machine = Machine(schedule, on_stale)
    machine.early = early
    for _ in range(4):
        for _ in range(60):
            machine.step()
            machine.check()
        rate = machine.failure_rate
        machine.must_go_on()
        machine.failure_rate = rate
    return machine


@settings(max_examples=150, deadline=None)
@given(SCHEDULES)
def test_waiting_never_passes_the_bound_never_deadlocks_and_loses_nothing(schedule: Schedule) -> None:
    machine = random_schedule(schedule, "wait")
    assert machine.stale == set()


@settings(max_examples=75, deadline=None)
@given(SCHEDULES)
def test_dropping_never_trains_past_the_bound_and_never_deadlocks(schedule: Schedule) -> None:
    random_schedule(schedule, "drop")


@settings(max_examples=75, deadline=None)
@given(SCHEDULES)
def test_publications_before_their_time_pass_no_bound_and_deadlock_nothing(schedule: Schedule) -> None:
    """An engine that comes back between two publications needs the newest weights at once."""
    random_schedule(schedule, "wait", early=0.2)


@pytest.mark.full
@settings(max_examples=2000, deadline=None)
@given(SCHEDULES)
def test_publications_before_their_time_at_length(schedule: Schedule) -> None:
    random_schedule(schedule, "wait", early=0.2)


@pytest.mark.full
@settings(max_examples=4000, deadline=None)
@given(SCHEDULES)
def test_waiting_at_length(schedule: Schedule) -> None:
    assert random_schedule(schedule, "wait").stale == set()


def test_more_groups_than_one_batch_may_fall_due_at_once() -> None:
    """Why it is not enough that the last batch before a publication takes all that fall due."""
    subject = gate(2, 2, "1")
    buffer = Buffer(subject, batch_groups=2, on_stale="wait")
    for i in range(8):
        subject.admit(f"old{i}")
    for i in range(2):
        buffer.put(Group(f"old{i}", [], 0))
    assert buffer.take() is not None
    buffer.put(Group("old2", [], 0))
    buffer.put(Group("old3", [], 0))
    assert buffer.take() is not None
    subject.published(1)
    for i in range(4):
        subject.admit(f"new{i}")
        buffer.put(Group(f"new{i}", [], 1))
    assert buffer.take() is None, "the four old ones that still run fill both batches of this version"
    for i in range(4, 8):
        buffer.put(Group(f"old{i}", [], 0))
    assert [group.id for group in buffer.take() or ()] == ["old4", "old5"]
    assert [group.id for group in buffer.take() or ()] == ["old6", "old7"]
