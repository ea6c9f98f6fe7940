"""Progress as a table of the last steps that stays in place, for terminals."""

from __future__ import annotations

from collections import deque

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentrl.observe import words
from agentrl.observe.progress import Progress

_ROWS = 12
"""Steps kept on screen: with the lines around them they fit a terminal of 24 lines."""
_BAR_WIDTH = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class LiveTable:
    """The last steps, the reward of each as a bar, and below them what is going on at this moment."""

    def __init__(self, console: Console) -> None:
        self._steps: deque[Progress] = deque(maxlen=_ROWS)
        self._least, self._most = 0.0, 0.0
        """Range of the rewards seen, 0 included: bars of all rows share it."""
        self._latest = Progress(phase="starting")
        self._ascii = console.options.ascii_only
        self._live = Live(self._render(), console=console, refresh_per_second=4)
        self._live.start()

    def update(self, progress: Progress) -> None:
        """Show a newer state; the screen follows within a quarter of a second."""
        if progress.step > self._latest.step:
            self._steps.append(progress)
            reward = progress.reward_mean or 0.0
            self._least, self._most = min(self._least, reward), max(self._most, reward)
        self._latest = progress
        self._live.update(self._render())

    def message(self, text: str) -> None:
        """Print `text` above the table."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the last state once more and give the terminal back."""
        self._live.stop()

    def _render(self) -> RenderableType:
        return Group(*([self._table()] if self._steps else []), *_status(self._latest))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for title in ("step", "reward", "", "lag", "train tok/s", "rollout tok/s", "idle % t/e"):
            table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
        for progress in self._steps:
            table.add_row(
                words.steps(progress),
                words.decimal(progress.reward_mean),
                Text(self._bar(progress.reward_mean), style="green"),
                words.lag(progress),
                words.quantity(progress.train_tokens_per_s),
                words.quantity(progress.rollout_tokens_per_s),
                f"{words.percent(progress.idle_trainer)}/{words.percent(progress.idle_engine)}",
            )
        return table

    def _bar(self, reward: float | None) -> str:
        """A bar as long as the reward stands in the range seen so far."""
        span = self._most - self._least
        if reward is None or span <= 0:
            return " " * _BAR_WIDTH
        share = (reward - self._least) / span
        if self._ascii:
            return ("#" * round(share * _BAR_WIDTH)).ljust(_BAR_WIDTH)
        full, eighths = divmod(round(share * _BAR_WIDTH * 8), 8)
        return ("█" * full + _EIGHTHS[eighths].strip()).ljust(_BAR_WIDTH)


def _status(progress: Progress) -> list[Text]:
    """The lines under the table."""
    run = [
        Text(progress.phase, style="bold"),
        Text(f"step {words.steps(progress)}"),
        Text(f"version {progress.policy_version}"),
        Text(f"elapsed {words.duration(progress.elapsed)}"),
        Text(f"left {words.duration(progress.eta)}"),
    ]
    flow = [
        Text(f"queue {words.quantity(progress.queue_size)}"),
        Text(f"running {words.running(progress)}"),
        Text(f"in flight {words.quantity(progress.in_flight)}"),
    ]
    if progress.val_accuracy is not None:
        flow.append(Text(f"val {words.validation(progress)}"))
    lines = [_joined(run), _joined(flow)]
    waiting = words.waiting(progress)
    if waiting is not None:
        lines.append(Text(waiting, style="yellow" if words.is_long_wait(progress) else "dim"))
    return lines


def _joined(parts: list[Text]) -> Text:
    return Text("  ", style="dim").join(parts)
