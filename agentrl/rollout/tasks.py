"""The tasks of a run, by environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.schema import MixedEnvironmentConfig
from agentrl.record import MessageError, Task
from agentrl.record.messages import normalise_messages
from agentrl.record.task import Split
from agentrl.rollout.sources import DataError, read_rows

__all__ = ["DataError", "load_tasks"]


def load_tasks(config: RunConfig, split: Split) -> dict[str, list[Task]]:
    """The training or held-out tasks by environment; their indices count through all environments.

    Raises:
        DataError: missing or broken file, a row without the prompt key, an environment without training tasks.
        PluginError: a function that can't be found.
    """
    tasks: dict[str, list[Task]] = {}
    first = 0
    for name, environment in config.mixture.items():
        source = environment.train if split == "train" else environment.val
        if source is None:
            continue
        key = f"environments.{name}.{split}" if config.environments else f"data.{split}"
        arguments = environment.train_args if split == "train" else environment.val_args
        rows = read_rows(source, arguments, key=key)
        tasks[name] = _tasks(rows, environment, name=name, split=split, first=first, key=key)
        first += len(tasks[name])
        if not tasks[name]:
            raise DataError(f"{key}: {source} holds no tasks")
    return tasks


def _tasks(
    rows: Iterable[Any], environment: MixedEnvironmentConfig, *, name: str, split: Split, first: int, key: str
) -> list[Task]:
    tasks = []
    for index, row in enumerate(rows):
        task = replace(_task(row, index, split, environment, key), environment=name, index=first + index, split=split)
        try:
            normalise_messages(task.messages())
        except (MessageError, TypeError) as error:
            raise DataError(
                f"{key}: the prompt of row {index} is neither a text nor a list of chat messages: {error}"
            ) from None
        tasks.append(task)
    return tasks


def _task(row: Any, index: int, split: Split, environment: MixedEnvironmentConfig, key: str) -> Task:
    if isinstance(row, Task):
        return replace(row, id=str(row.id or f"{split}-{index}"))
    prompt_key, answer_key = environment.prompt_key, environment.answer_key
    section = key.rpartition(".")[0]
    if not isinstance(row, Mapping):
        raise DataError(f"{key}: row {index} is {row!r}: use a Task or a mapping with {prompt_key!r}")
    missing = f"{key}: row {index} has no {{!r}} (it has: {', '.join(row)}): set {section}.{{}}"
    if prompt_key not in row:
        raise DataError(missing.format(prompt_key, "prompt_key"))
    if answer_key is not None and answer_key not in row:
        raise DataError(missing.format(answer_key, "answer_key, to null if the tasks have no answers"))
    return Task(
        prompt=row[prompt_key],
        answer=None if answer_key is None else row[answer_key],
        id=str(row.get("id", f"{split}-{index}")),
        data={column: value for column, value in row.items() if column not in (prompt_key, answer_key, "id")},
    )
