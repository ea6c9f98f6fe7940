"""Rows of data: from files, functions, and data sets of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.sdk.plugin import load_object

_FILES = ".jsonl and .parquet"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst", ".yaml", ".yml")
_PROBE_SECONDS = 5.0
"""How long the hub may take to answer at all. Without this look ahead `datasets` tries for minutes."""


class DataError(ValueError):
    """Data that can't be read as tasks; names the file, the line and the fix."""


def read_rows(source: str, arguments: dict[str, Any], *, key: str) -> Iterable[Any]:
    """The rows that a value of `data.train` or `data.val` names: mappings, or `Task`s where a function returns them.

    What exists on disk is a file; anything else with a colon is a function `package.module:name`; what ends in `.jsonl`
    or `.parquet` is a file that is missing; the rest is the id of a data set on the hub.

    Args:
        arguments: of the function, or of `datasets.load_dataset` (with `split: train` unless they say otherwise).
        key: the config key that `source` stands under, for messages.

    Raises:
        DataError: missing, broken or empty file, a function that fails, a data set that can't be had. Of a file, some
            of it only while its rows are read.
        PluginError: the function can't be found.
    """
    path = Path(source)
    if path.is_file():
        return _file_rows(path, key)
    if path.is_dir():
        raise DataError(f"{key}: {source} is a folder: name a file in it ({_FILES})")
    if "://" in source:
        raise DataError(f"{key}: {source} is a URL: download it, and name the file ({_FILES})")
    if ":" in source:
        return _function_rows(source, arguments, key)
    if path.suffix in (".jsonl", ".parquet"):
        raise DataError(
            f"{key}: there is no file {source} (from {Path.cwd()}); a function is named package.module:name"
        )
    if not _HUB_ID.fullmatch(source) or path.suffix in _OTHER_FILES or path.parent.is_dir():
        raise DataError(
            f"{key}: {source!r} is no file (from {Path.cwd()}; known: {_FILES}), no function (package.module:name) and "
            "no data set of the hub (owner/name)"
        )
    return hub_rows(source, arguments, key)


def _function_rows(source: str, arguments: dict[str, Any], key: str) -> list[Any]:
    function = load_object(source, key=key)
    try:
        return list(function(**arguments))
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise DataError(f"{key}: {source}({given}) raised {type(error).__name__}: {error}") from error


def _file_rows(path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{key}: {path} is of no known kind: use {_FILES}")
    return _checked(readers[path.suffix](path, key), path, key)


def _checked(rows: Iterator[Mapping[str, Any]], path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except OSError as error:
        raise DataError(f"{key}: {path} can't be read: {error}") from error
    if count == 0:
        raise DataError(f"{key}: {path} holds no tasks")


def _jsonl_rows(path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{key}: {path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{key}: {path}, line {number} is not a JSON object")
            yield row


def _parquet_rows(path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{key}: {path} is no readable Parquet file: {error}") from error


def hub_rows(source: str, arguments: dict[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a data set as `datasets.load_dataset(source, **arguments)` gives them.

    A hub that does not answer within seconds is done without: then only what was downloaded before can be had.

    Raises:
        DataError: it can't be had, or `arguments` name no single split.
    """
    import datasets
    from datasets import config

    offline = config.HF_HUB_OFFLINE
    unreachable = "" if offline or Path(source).is_dir() else hub_problem()
    try:
        with _offline(bool(unreachable)):
            rows = datasets.load_dataset(source, **{"split": "train", **arguments})
    except Exception as error:  # of many kinds: the data set's own files, its loader, the hub
        args = f"{key}_args"
        reason = f"{type(error).__name__}: {error}"
        if unreachable:
            reason = f"the hub can't be reached ({unreachable}), and no copy of it is in the cache"
        elif offline:
            reason = f"HF_HUB_OFFLINE is set, and no copy of it is in the cache ({reason})"
        raise DataError(
            f"{key}: {source!r} is no file here, and the data set {source} can't be loaded from the hub: {reason}: "
            f"check the name and {args} ({arguments}), download it on a machine with network, or name a file ({_FILES})"
        ) from error
    if isinstance(rows, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise DataError(
            f"{key}: {source} comes as several splits: set {key}_args.split to one of {', '.join(map(str, rows))}"
        )
    return rows  # pyright: ignore[reportReturnType]  # its rows are dictionaries


def hub_problem() -> str:
    """Why the hub does not answer; empty if it does, be it with an error."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except httpx.HTTPError as error:
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return ""


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Has `datasets` use its cache alone; the environment variable for it is only read at the import."""
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    if wanted:
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before
