"""The numbers of a run, one row a training step: `metrics.jsonl` for tools, TensorBoard events for eyes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

STEP_KEYS = (
    "step",
    "policy_version",
    "time",
    "reward/mean",
    "reward/std",
    "episode/turns",
    "tokens/trained",
    "staleness/lag_max",
    "staleness/lag_mean",
    "queue/size",
    "time/step",
    "time/wait_batch",
    "time/train",
    "time/publish",
    "throughput/train_tokens_per_s",
    "throughput/rollout_tokens_per_s",
    "idle/trainer",
    "idle/engine",
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/ratio_mean",
    "actor/clip_fraction",
    "actor/behav_weight_mean",
    "mismatch/kl",
    "mismatch/k3",
    "mismatch/max",
    "mismatch/ess",
)
"""The keys that the row of a training step always has, in the order they are written; further keys follow by name."""

Value = float | str | None
"""A value of a row: a number (numpy's scalars included), a text, or None for what could not be measured."""


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and, if asked, to TensorBoard events in `tensorboard/`.

    A row is on disk when `write` returns. In the file a number that is not finite is null, since JSON has no
    NaN and strict readers refuse it; TensorBoard gets it as it is and marks it in the curve. A last line that
    a crash cut off is removed when the file is opened again.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        path = run_dir / METRICS_FILE
        _drop_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._events = _event_writer(run_dir / TENSORBOARD_FOLDER) if tensorboard else None

    def write(self, row: Mapping[str, Value]) -> None:
        """Append one row.

        Args:
            row: `step`, and whatever was measured by then, by slash-separated names.

        Raises:
            ValueError: the row has no integer `step`.
            TypeError: a value is neither a number nor text nor None.
        """
        step = row.get("step")
        if not isinstance(step, Integral):
            raise ValueError(f"a row of metrics needs an integer 'step'; got {step!r}: add the training step")
        plain = {key: _plain(key, row[key]) for key in _ordered(row)}
        self._file.write(json.dumps({key: _finite(value) for key, value in plain.items()}, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            _add_scalars(self._events, int(step), plain)

    def close(self) -> None:
        """Finish both files. Writing afterwards is an error."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ordered(row: Mapping[str, Value]) -> list[str]:
    """The keys of a row: those of every step first, in their order, then the others by name."""
    return [key for key in STEP_KEYS if key in row] + sorted(row.keys() - set(STEP_KEYS))


def _plain(key: str, value: Any) -> Value:
    """A value as JSON knows it; numpy's scalars included."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
    raise TypeError(f"metric {key} is a {type(value).__name__}: pass a number, such as a tensor's .item()")


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_unfinished_line(path: Path) -> None:
    """Cut a file after its last line end: what follows was being written when the process died."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _event_writer(folder: Path) -> EventFileWriter:
    """TensorBoard's own writer, imported here since it is slow to import and does not need torch."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(folder))


def _add_scalars(events: EventFileWriter, step: int, row: Mapping[str, Value]) -> None:
    # Generated modules: their messages exist only at run time.
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    scalars = [
        Summary.Value(tag=key, simple_value=float(value))
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float)
    ]
    events.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
    events.flush()
