"""Says who holds up an event loop: an agent or environment that blocks it stops every episode of its process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback

log = logging.getLogger(__name__)

_TICK = 0.5


class LoopWatch:
    """A thread that looks whether the loop still turns, and logs the stack of what blocks it.

    Args:
        warn_after: seconds without a turn until that is logged, once for each blockage.
        give_up_after: seconds until the process ends with the stack as its last words: before its peers, which know
            nothing of the reason, give it up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, warn_after: float, give_up_after: float) -> None:
        self._loop = loop
        self._warn_after = warn_after
        self._give_up_after = give_up_after
        self._turned = time.monotonic()
        self._loop_thread = threading.get_ident()

    def start(self) -> None:
        """Watches from now on, as long as the process lives. Call it in the loop's thread."""
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def _turn(self) -> None:
        self._turned = time.monotonic()

    def _watch(self) -> None:
        warned = 0.0
        while not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._turn)
            time.sleep(_TICK)
            blocked = time.monotonic() - self._turned
            if blocked > self._give_up_after:
                log.error("the event loop has been blocked for %.0f s; the process ends\n%s", blocked, self._stack())
                logging.shutdown()
                os._exit(1)
            if blocked > self._warn_after and warned != self._turned:
                warned = self._turned
                log.warning(
                    "the event loop has been blocked for %.0f s, and every episode with it: async code must await, "
                    "blocking code belongs into a plain `run` or asyncio.to_thread\n%s",
                    blocked,
                    self._stack(),
                )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""
