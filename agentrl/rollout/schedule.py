"""The order in which tasks are dispatched: several environments by weight, each in epochs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.config import RunConfig
from agentrl.record import Task
from agentrl.sdk import Sampler
from agentrl.sdk.plugin import PluginError, load_class
from agentrl.sdk.sampler import ShuffledSampler


@dataclass(slots=True)
class _Course:
    """One environment's way through its tasks."""

    name: str
    sampler: Sampler
    weight: float
    tasks: Iterator[Task]
    dispatched: int = 0


class TaskSchedule:
    """Yields tasks until all environments have used up their epochs.

    Environments take turns so that at every moment each one's share of the dispatched tasks is as near to its weight
    as whole numbers allow. One that is used up leaves its turns to the others.

    Args:
        samplers: by environment.
        weights: of the environments.
        total_epochs: passes over each environment's tasks; None: without end.
    """

    def __init__(
        self, samplers: Mapping[str, Sampler], weights: Mapping[str, float], *, total_epochs: int | None
    ) -> None:
        self._samplers = dict(samplers)
        self._courses = [
            _Course(name, sampler, weights[name], _epochs(name, sampler, total_epochs))
            for name, sampler in samplers.items()
        ]

    @classmethod
    def from_config(cls, config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> TaskSchedule:
        """The schedule that a config describes for its training tasks.

        Raises:
            PluginError: `data.sampler` can't be found or built.
        """
        samplers = {name: build_sampler(config, tasks[name]) for name in config.mixture}
        weights = {name: environment.weight for name, environment in config.mixture.items()}
        steps, total_epochs = config.trainer.total_steps, config.trainer.total_epochs
        return cls(samplers, weights, total_epochs=1 if total_epochs is None and steps is None else total_epochs)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        while self._courses:
            # The half is Sainte-Lague's: with 1 a heavy environment would get all its turns before a light one's first.
            course = min(self._courses, key=lambda course: (course.dispatched + 0.5) / course.weight)
            task = next(course.tasks, None)
            if task is not None:
                course.dispatched += 1
                return task
            self._courses.remove(course)
        raise StopIteration

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Tells the task's sampler how its group ended."""
        sampler = self._samplers[task.environment]
        try:
            sampler.observe(task, rewards)
        except Exception as error:
            raise PluginError(
                f"data.sampler: {type(sampler).__name__}.observe raised {type(error).__name__}: {error}"
            ) from error


def build_sampler(config: RunConfig, tasks: Sequence[Task]) -> Sampler:
    """The sampler of one environment's tasks.

    Raises:
        PluginError: it can't be found, or not be built with `data.sampler_args`.
    """
    data = config.data
    if data.sampler is None:
        return (ShuffledSampler if data.shuffle else Sampler)(tasks, seed=data.seed)
    kwargs = {"tasks": tasks, "seed": data.seed, **data.sampler_args}
    cls = load_class(data.sampler, Sampler, key="data.sampler", group="agentrl.samplers", kwargs=kwargs)
    try:
        return cls(**kwargs)
    except Exception as error:
        raise PluginError(f"data.sampler: {data.sampler} can't be built: {type(error).__name__}: {error}") from error


def _epochs(name: str, sampler: Sampler, total_epochs: int | None) -> Iterator[Task]:
    epoch = 0
    while total_epochs is None or epoch < total_epochs:
        seen: set[int] = set()
        for position in sampler.epoch(epoch):
            if not isinstance(position, int):
                raise PluginError(
                    f"data.sampler: {type(sampler).__name__}.epoch({epoch}) gave {position!r}: give integer positions"
                )
            if position in seen or not 0 <= position < len(sampler.tasks):
                raise PluginError(
                    f"data.sampler: {type(sampler).__name__}.epoch({epoch}) gave position {position} "
                    f"{'twice' if position in seen else f'of {len(sampler.tasks)} tasks'}: give each at most once"
                )
            seen.add(position)
            yield replace(sampler.tasks[position], epoch=epoch)
        if not seen:
            raise PluginError(f"data.sampler: {type(sampler).__name__}.epoch({epoch}) gave no task of {name}")
        epoch += 1
