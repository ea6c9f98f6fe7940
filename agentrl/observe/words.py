"""Numbers of a run in few characters: `12.3k`, `04:31`, `0.412`. Unknown ones are a dash."""

from __future__ import annotations

from agentrl.observe.progress import Progress

UNKNOWN = "-"
_LONG_WAIT = 10.0
"""Seconds from which a wait is worth telling: shorter ones are the normal breath of a run."""


def quantity(value: float | None) -> str:
    """A count or rate in about three digits: `7`, `950`, `12.3k`, `4.5M`."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def decimal(value: float | None) -> str:
    """A reward or accuracy with three decimals."""
    return UNKNOWN if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    """A share of 1 as whole percent, without the sign."""
    return UNKNOWN if share is None else f"{100 * share:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def steps(progress: Progress) -> str:
    """The step, out of how many."""
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def lag(progress: Progress) -> str:
    """Mean and greatest lag: `0.4/2`."""
    mean = UNKNOWN if progress.lag_mean is None else f"{progress.lag_mean:.1f}"
    return f"{mean}/{UNKNOWN if progress.lag_max is None else progress.lag_max}"


def running(progress: Progress) -> str:
    """Episodes being played, out of how many may be."""
    return f"{quantity(progress.running)}/{quantity(progress.capacity)}"


def validation(progress: Progress) -> str:
    """The latest accuracy, and the one before training."""
    latest, first = progress.val_accuracy, progress.val_accuracy_first
    return decimal(latest) if first is None or first == latest else f"{decimal(latest)} (at first {decimal(first)})"


def waiting(progress: Progress) -> str | None:
    """What is waited for and how long; None if nothing is."""
    if progress.waiting_for is None:
        return None
    seconds = progress.waiting_seconds
    since = "" if seconds is None else f"{duration(seconds)} "
    return f"waiting {since}for {progress.waiting_for}"


def is_long_wait(progress: Progress) -> bool:
    """Whether something has been waited for unusually long."""
    return progress.waiting_for is not None and (progress.waiting_seconds or 0.0) > _LONG_WAIT
