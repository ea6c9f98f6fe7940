"""Rows from files, functions and the hub."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.rollout.sources import DataError, hub_rows, read_rows
from agentrl.sdk.plugin import PluginError

ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1), "tags": ["a", "b"]} for i in range(2500)]


def read(source: str | Path, **arguments: Any) -> list[Any]:
    return list(read_rows(str(source), arguments, key="data.train"))


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_jsonl_rows(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "train.jsonl")) == ROWS


def test_a_byte_order_mark_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}')
    assert read(tmp_path / "train.jsonl") == [{"a": 1}, {"a": 2}]


def test_parquet_rows(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    assert read(tmp_path / "train.parquet") == ROWS


def test_a_file_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a:b.jsonl")) == ROWS


def test_rows_of_a_function() -> None:
    tasks = read("agentrl.envs.math:arithmetic_tasks", count=3)
    assert len(tasks) == 3
    with pytest.raises(DataError, match=r"arithmetic_tasks\(count=-1\) raised ValueError"):
        read("agentrl.envs.math:arithmetic_tasks", count=-1)
    with pytest.raises(PluginError, match="no module 'no_such_module'"):
        read("no_such_module:tasks")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'{"a": 1}\n{"a": \n', r"train\.jsonl, line 2 is not JSON"),
        ("train.jsonl", b'{"a": 1}\n\xff\xfe\n', r"train\.jsonl, line 2 is not JSON"),
        ("train.jsonl", b"[" * 100_000 + b"\n", r"train\.jsonl, line 1 is not JSON"),
        ("train.jsonl", b"[1]\n", r"line 1 is not a JSON object"),
        ("train.jsonl", b"", r"train\.jsonl holds no tasks"),
        ("train.jsonl", b"\n\n", r"train\.jsonl holds no tasks"),
        ("train.parquet", b"PAR1 and no more", r"train\.parquet is no readable Parquet file"),
        ("train.parquet", b"", r"train\.parquet is no readable Parquet file"),
        ("train.csv", b"a,b\n1,2\n", r"train\.csv is of no known kind: use \.jsonl and \.parquet"),
        ("train", b"{}", r"train is of no known kind"),
    ],
)
def test_a_broken_file_is_named(in_folder: Path, name: str, content: bytes, message: str) -> None:
    (in_folder / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.train: .*{message}"):
        read(name)


def test_a_parquet_file_without_rows_holds_no_tasks(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="holds no tasks"):
        read(tmp_path / "train.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    content = bytearray(path.read_bytes())
    content[8:2000] = bytes(1992)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.parquet"):
        read(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", r"there is no file missing\.jsonl \(from /"),
        ("some/missing.parquet", r"there is no file some/missing\.parquet"),
        ("missing.csv", r"'missing\.csv' is no file .*known: \.jsonl and \.parquet.*owner/name"),
        ("some/missing.csv", "is no file"),
        ("here/missing", "is no file"),
        ("a/b/c", "is no file"),
        ("here", r"here is a folder: name a file in it \(\.jsonl and \.parquet\)"),
        ("https://example.com/train.jsonl", "is a URL: download it"),
    ],
)
def test_a_source_that_is_nothing_says_what_is_possible(in_folder: Path, source: str, message: str) -> None:
    (in_folder / "here").mkdir()
    with pytest.raises(DataError, match=rf"data\.train: .*{message}"):
        read(source)


@pytest.fixture
def local_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of two splits, in the layout that the hub has."""
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "words"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:20])
    write_jsonl(folder / "test.jsonl", ROWS[20:25])
    return folder


def test_data_sets_come_through_load_dataset(local_data_set: Path) -> None:
    def rows(**arguments: Any) -> list[Any]:
        return list(hub_rows(str(local_data_set), arguments, "data.train"))

    assert rows() == ROWS[:20]
    assert rows(split="test") == ROWS[20:25]
    assert rows(split="train[:3]") == ROWS[:3]
    assert rows(streaming=True) == ROWS[:20]
    with pytest.raises(DataError, match=r"set data\.train_args\.split to one of train, test"):
        rows(split=None)
    with pytest.raises(DataError, match=r"check the name and data\.train_args \(\{'name': 'nothing'"):
        rows(name="nothing")


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def load_in_a_process(folder: Path, **environment: str) -> tuple[str, float]:
    """What an unlucky run says, and after how many seconds; the libraries read their environment when imported."""
    code = "from agentrl.rollout.sources import read_rows; read_rows('owner/name', {}, key='data.train')"
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HOME": str(folder / "hf"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    return result.stderr.splitlines()[-1], time.monotonic() - began


def test_a_hub_that_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    said, seconds = load_in_a_process(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "DataError: data.train: 'owner/name' is no file here" in said
    assert "the hub can't be reached (http://127.0.0.1:9" in said and "name a file (.jsonl and .parquet)" in said
    assert seconds < 15


def test_a_silent_hub_is_an_error_within_seconds(tmp_path: Path, silent_hub: str) -> None:
    said, seconds = load_in_a_process(tmp_path, HF_ENDPOINT=silent_hub)
    assert "the hub can't be reached" in said
    assert seconds < 20


def test_hf_hub_offline_is_respected(tmp_path: Path, silent_hub: str) -> None:
    said, seconds = load_in_a_process(tmp_path, HF_ENDPOINT=silent_hub, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and no copy of it is in the cache" in said
    assert seconds < 15
