"""Progress as lines of text, for logs and pipes."""

from __future__ import annotations

from rich.console import Console

from agentrl.observe import words
from agentrl.observe.progress import Progress


class PlainLines:
    """One line a step, and one when something has been waited for long; never more often than it doubles."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0
        self._told_at = 0.0
        """Seconds of the present wait when it was last told; 0 if it was not."""

    def update(self, progress: Progress) -> None:
        """Print the step if it is new, and the wait if it has become long."""
        if progress.step > self._step:
            self._step = progress.step
            self.message(_step_line(progress))
        seconds = progress.waiting_seconds or 0.0
        if progress.waiting_for is None or seconds < self._told_at:
            self._told_at = 0.0  # this wait is over; another may have begun
        if words.is_long_wait(progress) and seconds >= 2 * self._told_at:
            self._told_at = seconds
            self.message(f"{words.waiting(progress)} | {_flow(progress)}")

    def message(self, text: str) -> None:
        """Print `text` as it is, unwrapped."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held open."""


def _step_line(progress: Progress) -> str:
    parts = [
        f"step {words.steps(progress)}",
        f"reward {words.decimal(progress.reward_mean)}",
        f"version {progress.policy_version}",
        f"lag {words.lag(progress)}",
        f"tokens/s train {words.quantity(progress.train_tokens_per_s)}"
        f" rollout {words.quantity(progress.rollout_tokens_per_s)}",
        f"idle % train {words.percent(progress.idle_trainer)} engine {words.percent(progress.idle_engine)}",
        _flow(progress),
        f"elapsed {words.duration(progress.elapsed)}",
    ]
    if progress.val_accuracy is not None:
        parts.insert(2, f"val {words.validation(progress)}")
    if progress.eta is not None:
        parts.append(f"left {words.duration(progress.eta)}")
    return " | ".join(parts)


def _flow(progress: Progress) -> str:
    return (
        f"queue {words.quantity(progress.queue_size)} running {words.running(progress)}"
        f" in flight {words.quantity(progress.in_flight)}"
    )
