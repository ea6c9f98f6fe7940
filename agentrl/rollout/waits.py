"""What the rollout side waits for, for how long, and who holds it: no wait is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

_FIRST_REPORT = 60.0
_LOOK_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Wait:
    what: str
    held_by: Callable[[], str]
    since: float
    report_at: float

    def describe(self, now: float) -> str:
        return f"{self.what} for {now - self.since:.0f} s; {self.held_by()}"


class WaitBoard:
    """The waits in progress. Each has somebody who can end it; the board only tells of them."""

    def __init__(self, *, first_report: float = _FIRST_REPORT, clock: Callable[[], float] = time.monotonic) -> None:
        self._waits: list[_Wait] = []
        self._first_report = first_report
        self._clock = clock

    @contextmanager
    def waiting(self, what: str, held_by: Callable[[], str]) -> Iterator[None]:
        """Marks a block as a wait.

        Args:
            what: what for, in words that follow "waiting for".
            held_by: says who holds it now.
        """
        now = self._clock()
        wait = _Wait(what, held_by, now, now + self._first_report)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def describe(self) -> str:
        """The longest wait in words; empty if there is none."""
        return f"{self._waits[0].what} ({self._waits[0].held_by()})" if self._waits else ""

    def report(self) -> None:
        """Logs each wait that has become long, again whenever it has become twice as long."""
        now = self._clock()
        for wait in self._waits:
            if now >= wait.report_at:
                wait.report_at = wait.since + 2 * (now - wait.since)
                log.warning("still waiting for %s", wait.describe(now))

    async def watch(self) -> None:
        """Reports until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.report()
