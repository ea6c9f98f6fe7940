"""Where tasks come from, and in which order they are visited."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.schema import DataConfig
from agentrl.record import MessageError, Task
from agentrl.record.messages import normalise_messages
from agentrl.record.task import Split
from agentrl.sdk.plugin import load_object


class DataError(ValueError):
    """Data that can't be read as tasks; names the file, the line and the fix."""


def load_tasks(data: DataConfig, split: Split) -> list[Task]:
    """The tasks of `data.train` or `data.val`: rows of a JSONL file, or what a function returns.

    Raises:
        DataError: missing or broken file, a row without the prompt key, no tasks at all.
        PluginError: the function can't be found.
    """
    key = f"data.{split}"
    source = data.train if split == "train" else data.val
    arguments = data.train_args if split == "train" else data.val_args
    if source is None:
        return []
    if ":" in source and not Path(source).exists():
        rows = _call(source, arguments, key)
    else:
        rows = _read_jsonl(Path(source), key)
    tasks = []
    for index, row in enumerate(rows):
        task = _task(row, index, split, data, key)
        try:
            normalise_messages(task.messages())
        except (MessageError, TypeError) as error:
            raise DataError(
                f"{key}: the prompt of row {index} is neither a text nor a list of chat messages: {error}"
            ) from None
        tasks.append(task)
    if not tasks:
        raise DataError(f"{key}: {source} holds no tasks")
    return tasks


def _call(source: str, arguments: dict[str, Any], key: str) -> list[Any]:
    function = load_object(source, key=key)
    try:
        return list(function(**arguments))
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise DataError(f"{key}: {source}({given}) raised {type(error).__name__}: {error}") from error


def _read_jsonl(path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"{key}: there is no file {path} (from {Path.cwd()}); a function is named package.module:name")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise DataError(f"{key}: {path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{key}: {path}, line {number} is not a JSON object")
            yield row


def _task(row: Any, index: int, split: Split, data: DataConfig, key: str) -> Task:
    if isinstance(row, Task):
        return replace(row, id=str(row.id or f"{split}-{index}"), index=index, split=split)
    if not isinstance(row, Mapping):
        raise DataError(f"{key}: row {index} is {row!r}: use a Task or a mapping with {data.prompt_key!r}")
    if data.prompt_key not in row:
        raise DataError(
            f"{key}: row {index} has no {data.prompt_key!r} (it has: {', '.join(row)}): set data.prompt_key"
        )
    rest = {name: value for name, value in row.items() if name not in (data.prompt_key, data.answer_key, "id")}
    return Task(
        prompt=row[data.prompt_key],
        answer=row.get(data.answer_key),
        id=str(row.get("id", f"{split}-{index}")),
        data=rest,
        index=index,
        split=split,
    )


def epochs(tasks: list[Task], *, shuffle: bool, seed: int, total_epochs: int | None) -> Iterator[Task]:
    """The tasks, epoch after epoch (without end if `total_epochs` is None), each epoch in an order of its own."""
    epoch = 0
    while total_epochs is None or epoch < total_epochs:
        order: Iterable[int] = range(len(tasks))
        if shuffle:
            order = random.Random(f"{seed}:{epoch}").sample(range(len(tasks)), len(tasks))
        for index in order:
            yield replace(tasks[index], epoch=epoch)
        epoch += 1
