"""In which order tasks come: epochs, samplers, several environments by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Sampler, Task
from agentrl.config import RunConfig
from agentrl.rollout.schedule import TaskSchedule
from agentrl.sdk.plugin import PluginError

TASKS = [Task(f"task {i}", index=i, id=str(i)) for i in range(9)]


class HardestFirst(Sampler):
    """Visits the tasks by their mean reward so far, the lowest first; `skip` of the best are left out."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, skip: int = 0) -> None:
        super().__init__(tasks, seed=seed)
        self.skip = skip
        self.rewards: dict[str, float] = {}

    def epoch(self, number: int) -> Iterator[int]:
        left = set(range(len(self.tasks)))
        while len(left) > self.skip:
            hardest = min(left, key=lambda position: (self.rewards.get(self.tasks[position].id, 0.0), position))
            left.remove(hardest)
            yield hardest

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        self.rewards[task.id] = sum(rewards) / len(rewards)


class Broken(Sampler):
    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, positions: Iterable[int] = ()) -> None:
        super().__init__(tasks, seed=seed)
        self.positions = positions

    def epoch(self, number: int) -> Iterable[int]:
        return self.positions


def schedule(tasks: Sequence[Task] = TASKS, **data: Any) -> TaskSchedule:
    trainer = data.pop("trainer", {"total_epochs": 3})
    config = RunConfig.model_validate({"data": {"train": "tasks.jsonl", **data}, "trainer": trainer})
    return TaskSchedule.from_config(config, {"default": tasks})


def visited(**data: Any) -> list[list[int]]:
    order = list(schedule(**data))
    assert [task.epoch for task in order] == [epoch for epoch in range(3) for _ in TASKS]
    return [[task.index for task in order if task.epoch == epoch] for epoch in range(3)]


def test_each_task_is_visited_once_an_epoch_in_an_order_of_its_own() -> None:
    order = visited()
    assert all(sorted(epoch) == list(range(9)) for epoch in order)
    assert len({tuple(epoch) for epoch in order}) == 3


def test_the_order_is_that_of_the_seed() -> None:
    assert visited(seed=1) == visited(seed=1) != visited(seed=2)


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert visited(shuffle=False) == [list(range(9))] * 3


def test_epochs_go_on_without_end_where_only_steps_are_counted() -> None:
    order = schedule(TASKS[:2], shuffle=False, trainer={"total_steps": 1})
    assert [(task.epoch, task.index) for task in islice(order, 5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_a_sampler_of_ones_own_learns_from_rewards_and_may_leave_tasks_out() -> None:
    order = schedule(TASKS[:3], sampler=f"{__name__}:HardestFirst", sampler_args={"skip": 1})
    seen: list[str] = []
    for task in order:
        seen.append(task.id)
        order.observe(task, [{"0": 0.9, "1": 0.5, "2": 0.0}[task.id]])
    assert seen == ["0", "1", "2", "1", "2", "1"]


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (("a",), "gave 'a': give integer positions"),
        ((1, 1), "position 1 twice"),
        ((9,), "position 9 of 9 tasks"),
        ((), "gave no task of default"),
    ],
)
def test_a_sampler_that_breaks_its_word_is_named(positions: tuple[Any, ...], says: str) -> None:
    order = schedule(sampler=f"{__name__}:Broken", sampler_args={"positions": positions})
    with pytest.raises(PluginError, match=says):
        list(order)


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        ("curriculm", "data.sampler: 'curriculm' is neither of the form package.module:Name nor an entry point"),
        (f"{__name__}:TASKS", "must be a subclass of Sampler"),
        (f"{__name__}:HardestFirst", "can't be built with .*bogus.*: see data.sampler_args"),
    ],
)
def test_a_sampler_that_is_none_is_refused(sampler: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        schedule(sampler=sampler, sampler_args={"bogus": 1})


def mixed(weights: dict[str, float], sizes: dict[str, int], total_epochs: int | None) -> TaskSchedule:
    samplers = {
        name: Sampler([Task("p", index=i, environment=name) for i in range(size)]) for name, size in sizes.items()
    }
    return TaskSchedule(samplers, weights, total_epochs=total_epochs)


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.05, 20), min_size=1), st.integers(1, 200))
def test_at_every_moment_the_shares_are_those_of_the_weights(weights: dict[str, float], count: int) -> None:
    order = mixed(weights, dict.fromkeys(weights, 5), None)
    seen = Counter(task.environment for task in islice(order, count))
    for name, weight in weights.items():
        assert abs(seen[name] - count * weight / sum(weights.values())) <= max(1.0, len(weights) / 2)


def test_an_environment_that_is_used_up_leaves_its_turns_to_the_others() -> None:
    order = list(mixed({"a": 3, "b": 1}, {"a": 3, "b": 4}, 2))
    assert Counter(task.environment for task in order) == {"a": 6, "b": 8}
    assert Counter((task.environment, task.epoch, task.index) for task in order).most_common(1)[0][1] == 1
    assert {task.environment for task in order[8:]} == {"b"}


def test_a_sampler_that_crashes_when_told_is_named() -> None:
    order = schedule(TASKS[:1], sampler=f"{__name__}:HardestFirst")
    with pytest.raises(PluginError, match=r"data\.sampler: HardestFirst\.observe raised ZeroDivisionError"):
        order.observe(TASKS[0], [])
