"""Waiting for a condition without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes all waiters of one event loop when something changed; each then looks at its own condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the next `notify`."""
        await self._event.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition()` holds; it is checked at every `notify`."""
        while not condition():
            await self.wait()
