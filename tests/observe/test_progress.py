"""The live views: what they say, how often, and that a narrow terminal holds them."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from agentrl.observe import Progress, progress_view
from agentrl.observe.live_table import LiveTable
from agentrl.observe.plain_lines import PlainLines

WIDE: dict[str, Any] = {
    "phase": "training",
    "total_steps": 10_000,
    "policy_version": 9_999,
    "val_accuracy": 0.412,
    "val_accuracy_first": 0.101,
    "lag_max": 12,
    "lag_mean": 10.25,
    "train_tokens_per_s": 123_456.0,
    "rollout_tokens_per_s": 98_765_432.0,
    "idle_trainer": 1.0,
    "idle_engine": 1.0,
    "queue_size": 1024,
    "in_flight": 4096,
    "running": 2048,
    "capacity": 2048,
    "elapsed": 400_000.0,
    "eta": 999_999.0,
    "waiting_for": "batch: 3 of 8 groups, oldest episode 41 s old, held by rollout-worker-0, [bold]gate open[/bold]",
}
"""A state with every field as wide as it gets."""


def lines_of(*states: Progress) -> list[str]:
    output = StringIO()
    view = PlainLines(Console(file=output, width=80))
    for state in states:
        view.update(state)
    view.close()
    return output.getvalue().splitlines()


def waiting(seconds: float, step: int = 0) -> Progress:
    return Progress(phase="training", step=step, waiting_for="batch", waiting_seconds=seconds, queue_size=3)


class TestPlainLines:
    def test_one_line_a_step_however_often_it_is_updated(self) -> None:
        state = Progress(phase="training", step=1, total_steps=5, reward_mean=0.25, lag_max=1, lag_mean=0.5)
        lines = lines_of(Progress(phase="loading"), state, state, Progress(phase="training", step=2))
        assert [line.partition(" |")[0] for line in lines] == ["step 1/5", "step 2"]
        assert "reward 0.250" in lines[0] and "lag 0.5/1" in lines[0]
        assert "reward -" in lines[1], "what is not known is a dash"

    def test_a_line_is_never_wrapped_and_brackets_are_text(self) -> None:
        [line] = lines_of(Progress(step=1, waiting_seconds=1.0, **WIDE))
        assert len(line) > 80
        view_output = StringIO()
        PlainLines(Console(file=view_output, width=80)).message("a [bold]b[/bold]")
        assert view_output.getvalue() == "a [bold]b[/bold]\n"

    def test_a_long_wait_is_told_with_what_is_known(self) -> None:
        assert lines_of(waiting(9.0)) == []
        [line] = lines_of(waiting(9.0), waiting(11.0))
        assert line == "waiting 0:11 for batch | queue 3 running -/- in flight -"

    def test_the_same_wait_is_told_again_when_it_has_doubled(self) -> None:
        told = lines_of(*(waiting(float(seconds)) for seconds in range(0, 100)))
        assert [line.split()[1] for line in told] == ["0:11", "0:22", "0:44", "1:28"]

    def test_a_new_wait_is_told_anew(self) -> None:
        assert len(lines_of(waiting(11.0), waiting(2.0), waiting(12.0))) == 2
        assert len(lines_of(waiting(11.0), Progress(phase="training"), waiting(12.0))) == 2


def screen(*states: Progress, width: int = 80, messages: tuple[str, ...] = ()) -> list[str]:
    """The lines that remain on a terminal when the view is closed."""
    console = Console(file=StringIO(), width=width, height=24, force_terminal=True, record=True)
    view = LiveTable(console)
    for state in states:
        view.update(state)
    for text in messages:
        view.message(text)
    view.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


class TestLiveTable:
    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_no_line_is_wider_than_the_terminal(self, width: int) -> None:
        states = [
            Progress(step=step, reward_mean=-1 + step / 5, waiting_seconds=99.0, **WIDE)
            for step in range(9_980, 10_001)
        ]
        lines = screen(*states, width=width)
        assert all(cell_len(line) <= width for line in lines)

    def test_eighty_columns_hold_every_column_in_full(self) -> None:
        states = [Progress(step=step, reward_mean=0.5, **WIDE) for step in range(9_980, 10_001)]
        lines = screen(*states)
        text = "\n".join(lines)
        assert "…" not in text
        for word in ("10000/10000", "0.500", "10.2/12", "123.5k", "98.8M", "100/100", "idle %", "train tok/s"):
            assert word in text

    def test_the_last_twelve_steps_stay(self) -> None:
        lines = screen(*(Progress(phase="training", step=step, reward_mean=0.5) for step in range(31)))
        steps = [int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdigit()]
        assert steps == list(range(19, 31))
        assert len(lines) <= 24

    def test_bars_grow_with_the_reward(self) -> None:
        rewards = [0.0, 0.25, 0.5, 1.0]
        lines = screen(*(Progress(phase="training", step=i + 1, reward_mean=r) for i, r in enumerate(rewards)))
        bars = [
            line.count("█") for line in lines if "0.000" in line or "0.250" in line or ".5" in line or "1.0" in line
        ]
        assert bars == [0, 2, 5, 10]

    def test_the_status_says_what_is_going_on(self) -> None:
        text = "\n".join(screen(Progress(step=3, waiting_seconds=12.0, **WIDE)))
        for word in ("training", "queue 1.0k", "in flight 4.1k", "running 2.0k/2.0k", "left 277:46:39"):
            assert word in text
        assert "waiting 0:12 for batch: 3 of 8 groups" in text
        assert "[bold]gate open[/bold]" in text, "brackets are text"
        assert "val 0.412 (at first 0.101)" in text

    def test_messages_stay_above(self) -> None:
        lines = screen(Progress(phase="training", step=1), messages=("weights [v3] published",))
        assert lines.index("weights [v3] published") < next(i for i, line in enumerate(lines) if "reward" in line)

    def test_before_the_first_step_the_phase_is_shown(self) -> None:
        assert screen(Progress(phase="loading model"))[0].startswith("loading model")


def test_the_view_follows_the_console() -> None:
    terminal = progress_view(Console(file=StringIO(), force_terminal=True))
    terminal.close()
    assert isinstance(terminal, LiveTable)
    assert isinstance(progress_view(Console(file=StringIO())), PlainLines)
