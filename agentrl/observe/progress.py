"""What a run shows while it runs: the state it reports, and the views that can show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a run at one moment. None: not known, or not measured yet."""

    phase: str
    """What the run is doing: `loading`, `validating`, `training`, ..."""
    step: int = 0
    """Training steps finished. The numbers of a step are shown when this grows."""
    total_steps: int | None = None
    policy_version: int = 0
    """Version of the published weights."""

    reward_mean: float | None = None
    """Mean reward of the episodes of the last step."""
    val_accuracy: float | None = None
    """Latest result on the held-out tasks."""
    val_accuracy_first: float | None = None
    """Result before training, to compare with."""

    lag_max: int | None = None
    """Policy versions between the oldest token of the last step and the weights that trained on it."""
    lag_mean: float | None = None
    train_tokens_per_s: float | None = None
    rollout_tokens_per_s: float | None = None
    idle_trainer: float | None = None
    """Share of the last step that the trainer waited, 0 to 1."""
    idle_engine: float | None = None
    """Share of the last step that the engines waited, 0 to 1."""

    queue_size: int | None = None
    """Finished groups that wait for the trainer."""
    in_flight: int | None = None
    """Episodes without a fate yet: being played, queued, or being trained on."""
    running: int | None = None
    """Episodes being played."""
    capacity: int | None = None
    """Most episodes that may be played at once."""

    elapsed: float = 0.0
    """Seconds since the run began."""
    eta: float | None = None
    """Seconds until it ends, estimated."""
    waiting_for: str | None = None
    """What is waited for and who holds it, such as `batch: 3 of 8 groups, oldest episode 41 s old`."""
    waiting_seconds: float | None = None
    """How long this has been waited for."""


TABLE_WIDTH = 74
"""Columns that the live table needs."""


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def update(self, progress: Progress) -> None:
        """Show a newer state; called a few times a second."""
        ...

    def message(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def close(self) -> None:
        """Leave what was shown last on the screen and give the terminal back."""
        ...


def progress_view(console: Console) -> ProgressView:
    """A live table on a terminal wide enough for it, plain lines elsewhere."""
    from agentrl.observe.live_table import LiveTable
    from agentrl.observe.plain_lines import PlainLines

    return LiveTable(console) if console.is_terminal and console.width >= TABLE_WIDTH else PlainLines(console)
