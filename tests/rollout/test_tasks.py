"""Where tasks come from, and what is said about data that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig
from agentrl.record import Task
from agentrl.record.task import Split
from agentrl.rollout import DataError
from agentrl.rollout import tasks as rollout_tasks
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


def config(train: str | Path, **keys: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"train": str(train), **keys}})


def load_tasks(config: RunConfig, split: Split) -> list[Task]:
    """The tasks of a run's only environment."""
    return rollout_tasks.load_tasks(config, split).get("default", [])


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_a_file_become_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "a", "answer": "1", "level": 3}',
        "",
        '{"prompt": [{"role": "user", "content": "b"}], "id": 7, "answer": null}',
    )
    assert load_tasks(config(path), "train") == [
        Task("a", "1", id="train-0", data={"level": 3}, index=0),
        Task([{"role": "user", "content": "b"}], None, id="7", index=1),
    ]


def test_the_keys_of_prompt_and_answer_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "a", "gold": 1}')
    (task,) = load_tasks(config(path, prompt_key="question", answer_key="gold"), "train")
    assert (task.prompt, task.answer, task.data) == ("a", 1, {})


def test_tasks_without_answers_say_so(tmp_path: Path) -> None:
    (task,) = load_tasks(config(write(tmp_path, '{"prompt": "a", "gold": 1}'), answer_key=None), "train")
    assert (task.answer, task.data) == (None, {"gold": 1})


def test_the_tasks_of_several_environments_are_counted_through(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "a", "gold": 1}', '{"question": "b", "gold": 1}')
    environments = {
        "numbers": {"train": "task_source:tasks", "train_args": {"count": 3}, "val": "task_source:tasks"},
        "words": {"train": str(path), "prompt_key": "question", "answer_key": "gold"},
    }
    run = RunConfig.model_validate({"environments": environments})
    tasks = rollout_tasks.load_tasks(run, "train")
    assert {name: [(t.index, t.environment, t.id) for t in own] for name, own in tasks.items()} == {
        "numbers": [(0, "numbers", "train-0"), (1, "numbers", "train-1"), (2, "numbers", "train-2")],
        "words": [(3, "words", "train-0"), (4, "words", "train-1")],
    }
    assert [*rollout_tasks.load_tasks(run, "val")] == ["numbers"]
    with pytest.raises(DataError, match=r"environments\.words\.train: there is no file nowhere\.jsonl"):
        rollout_tasks.load_tasks(
            RunConfig.model_validate({"environments": {"words": {"train": "nowhere.jsonl"}}}), "train"
        )


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
        (['{"prompt": "a", "answer": 1}', '{"prompt": '], r"data\.train: .*train\.jsonl, line 2 is not JSON"),
        (['{"prompt": "a", "answer": 1}', "", "[1]"], "line 3 is not a JSON object"),
        (['{"question": "a", "gold": 1}'], r"row 0 has no 'prompt' \(it has: question, gold\): set data\.prompt_key"),
        (
            ['{"prompt": "a", "gold": 1}'],
            r"row 0 has no 'answer' \(it has: prompt, gold\): set data\.answer_key, to null",
        ),
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


@pytest.mark.parametrize("prompt", ["42", "null", "[]", '["a"]', '[{"content": "no role"}]'])
def test_a_prompt_that_no_template_can_render_is_refused_with_its_row(tmp_path: Path, prompt: str) -> None:
    path = write(tmp_path, '{"prompt": "good", "answer": 1}', f'{{"prompt": {prompt}, "answer": 1}}')
    with pytest.raises(DataError, match=r"data\.train: the prompt of row 1 is neither a text nor a list"):
        load_tasks(config(path), "train")


def test_what_a_function_raises_is_said_with_its_arguments() -> None:
    with pytest.raises(DataError, match=r"task_source:tasks\(bogus=1\) raised TypeError: .*bogus"):
        load_tasks(config("task_source:tasks", train_args={"bogus": 1}), "train")


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "\xe4"}\n')
    with pytest.raises(DataError, match="line 2"):
        load_tasks(config(path), "train")
