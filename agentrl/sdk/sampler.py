"""Samplers: which task comes next."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.record import Task


class Sampler:
    """Orders the tasks of each pass over the data. Subclass it for a curriculum; name it in `data.sampler`.

    This one visits all tasks as they come. There is one sampler an environment.

    Args:
        tasks: all training tasks of the environment.
        seed: `data.seed`.
        further keyword arguments of a subclass: `data.sampler_args`.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0) -> None:
        self.tasks = tasks
        self.seed = seed

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Raises a ValueError if the constructor can't work with these arguments; asked before any process starts."""

    def epoch(self, number: int) -> Iterable[int]:
        """Positions in `tasks` for the pass with that number, from 0; each at most once, at least one of them.

        A generator is asked for the next position only when a group can start, so that it may heed what `observe`
        was told meanwhile.
        """
        return range(len(self.tasks))

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """A group of this task has ended with these rewards (of its judged episodes; may be empty)."""


class ShuffledSampler(Sampler):
    """Visits all tasks of a pass in a random order, another one each time."""

    def epoch(self, number: int) -> Iterable[int]:
        return random.Random(f"{self.seed}:{number}").sample(range(len(self.tasks)), len(self.tasks))
