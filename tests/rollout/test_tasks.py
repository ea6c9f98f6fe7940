"""Where tasks come from, in which order, and what is said about data that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import DataConfig
from agentrl.record import Task
from agentrl.rollout import DataError, load_tasks
from agentrl.rollout.tasks import epochs
from agentrl.sdk.plugin import PluginError

SOURCE = """
from agentrl import Task

def tasks(count=2):
    return [Task(f"task {i}", i) for i in range(count)]

def rows():
    return iter([{"prompt": "a", "answer": 1}, Task("b", id="mine")])

def nothing():
    return []

def strings():
    return ["a prompt"]
"""


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def config(train: str | Path, **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"train": str(train), **keys})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_a_file_become_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "a", "answer": "1", "level": 3}',
        "",
        '{"prompt": [{"role": "user", "content": "b"}], "id": 7}',
    )
    assert load_tasks(config(path), "train") == [
        Task("a", "1", id="train-0", data={"level": 3}, index=0),
        Task([{"role": "user", "content": "b"}], None, id="7", index=1),
    ]


def test_the_keys_of_prompt_and_answer_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "a", "gold": 1}')
    (task,) = load_tasks(config(path, prompt_key="question", answer_key="gold"), "train")
    assert (task.prompt, task.answer, task.data) == ("a", 1, {})


def test_a_function_gives_tasks_with_the_arguments_of_the_config() -> None:
    tasks = load_tasks(config("task_source:tasks", train_args={"count": 3}), "train")
    assert [(task.prompt, task.id, task.index, task.split) for task in tasks] == [
        (f"task {i}", f"train-{i}", i, "train") for i in range(3)
    ]


def test_a_function_may_give_rows_and_tasks_and_names_of_its_own() -> None:
    assert [task.id for task in load_tasks(config("task_source:rows"), "train")] == ["train-0", "mine"]


def test_held_out_tasks_are_marked_and_may_be_missing() -> None:
    data = config("task_source:tasks", val="task_source:tasks", val_args={"count": 1})
    assert [(task.id, task.split) for task in load_tasks(data, "val")] == [("val-0", "val")]
    assert load_tasks(config("task_source:tasks"), "val") == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"data\.train: .*train\.jsonl, line 2 is not JSON"),
        (['{"prompt": "a"}', "", "[1]"], "line 3 is not a JSON object"),
        (['{"question": "a", "gold": 1}'], r"row 0 has no 'prompt' \(it has: question, gold\): set data\.prompt_key"),
        ([""], r"train\.jsonl holds no tasks"),
    ],
)
def test_a_file_that_holds_no_tasks_is_explained(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_tasks(config(write(tmp_path, *lines)), "train")


def test_a_missing_file_is_named_with_where_it_was_looked_for() -> None:
    with pytest.raises(DataError, match=r"data\.train: there is no file nowhere\.jsonl \(from /"):
        load_tasks(config("nowhere.jsonl"), "train")


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("task_source:nothing", DataError, "task_source:nothing holds no tasks"),
        ("task_source:strings", DataError, "row 0 is 'a prompt': use a Task or a mapping with 'prompt'"),
        ("task_source:nowhere", PluginError, "data.train: module task_source has no 'nowhere'"),
        ("no_such_source:tasks", PluginError, "data.train: no module 'no_such_source'"),
    ],
)
def test_a_function_that_gives_no_tasks_is_explained(source: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_tasks(config(source), "train")


TASKS = [Task(f"task {i}", index=i, id=str(i)) for i in range(9)]


def visited(*, shuffle: bool = True, seed: int = 0, total_epochs: int = 3) -> list[list[int]]:
    order = list(epochs(TASKS, shuffle=shuffle, seed=seed, total_epochs=total_epochs))
    assert [task.epoch for task in order] == [epoch for epoch in range(total_epochs) for _ in TASKS]
    return [[task.index for task in order if task.epoch == epoch] for epoch in range(total_epochs)]


def test_each_task_is_visited_once_an_epoch_in_an_order_of_its_own() -> None:
    order = visited()
    assert all(sorted(epoch) == list(range(9)) for epoch in order)
    assert len({tuple(epoch) for epoch in order}) == 3


def test_the_order_is_that_of_the_seed() -> None:
    assert visited(seed=1) == visited(seed=1) != visited(seed=2)


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert visited(shuffle=False) == [list(range(9))] * 3


def test_epochs_go_on_without_end_where_only_steps_are_counted() -> None:
    order = epochs(TASKS[:2], shuffle=False, seed=0, total_epochs=None)
    assert [(task.epoch, task.index) for task, _ in zip(order, range(5), strict=False)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    ]


@pytest.mark.parametrize("prompt", ["42", "null", "[]", '["a"]', '[{"content": "no role"}]'])
def test_a_prompt_that_no_template_can_render_is_refused_with_its_row(tmp_path: Path, prompt: str) -> None:
    path = write(tmp_path, '{"prompt": "good"}', f'{{"prompt": {prompt}}}')
    with pytest.raises(DataError, match=r"data\.train: the prompt of row 1 is neither a text nor a list"):
        load_tasks(config(path), "train")


def test_what_a_function_raises_is_said_with_its_arguments() -> None:
    with pytest.raises(DataError, match=r"task_source:tasks\(bogus=1\) raised TypeError: .*bogus"):
        load_tasks(config("task_source:tasks", train_args={"bogus": 1}), "train")


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    with pytest.raises(DataError, match="line 2"):
        load_tasks(config(path), "train")
