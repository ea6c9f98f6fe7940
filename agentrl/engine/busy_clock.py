"""How long an engine behind somebody else's interface computed, and how long it was paused."""

from __future__ import annotations

import time


class BusyClock:
    """Busy is an engine while it has requests and is not paused.

    Attributes:
        in_flight: requests it has now.
        paused_seconds: of the pauses that are over.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.paused_seconds = 0.0
        self._busy = 0.0
        self._busy_since: float | None = None
        self._paused_since: float | None = None

    @property
    def paused(self) -> bool:
        return self._paused_since is not None

    @property
    def busy_seconds(self) -> float:
        """Until now."""
        return self._busy + (0.0 if self._busy_since is None else time.perf_counter() - self._busy_since)

    def count(self, change: int) -> None:
        """So many more requests are in flight."""
        self.in_flight += change
        self._note()

    def pause(self) -> None:
        """Nothing is computed from now on; of a pause within a pause nothing is noted."""
        if self._paused_since is None:
            self._paused_since = time.perf_counter()
            self._note()

    def resume(self) -> None:
        """The pause is over, if there was one."""
        if self._paused_since is not None:
            self.paused_seconds += time.perf_counter() - self._paused_since
            self._paused_since = None
            self._note()

    def _note(self) -> None:
        now = time.perf_counter()
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if self.in_flight and not self.paused else None
