"""A blocked event loop is named while it is blocked, and ends its process before its peers lose it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time

from agentrl.cluster.loop_watch import LoopWatch


def a_tool_that_blocks(until: threading.Event) -> None:
    until.wait(10)


def test_whoever_blocks_the_loop_is_named_once() -> None:
    seen = threading.Event()
    said: list[str] = []

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            seen.set()

    async def main() -> None:
        LoopWatch(asyncio.get_running_loop(), warn_after=0.1, give_up_after=60).start()
        await asyncio.sleep(0)
        a_tool_that_blocks(seen)

    handler = Notice()
    logging.getLogger("agentrl.cluster.loop_watch").addHandler(handler)
    try:
        asyncio.run(main())
    finally:
        logging.getLogger("agentrl.cluster.loop_watch").removeHandler(handler)
    (message,) = said
    assert "a_tool_that_blocks" in message and "asyncio.to_thread" in message


def test_a_loop_that_stays_blocked_ends_its_process_with_the_stack() -> None:
    code = (
        "import asyncio, time, logging; from agentrl.cluster.loop_watch import LoopWatch\n"
        "async def stuck():\n"
        "    LoopWatch(asyncio.get_running_loop(), warn_after=9, give_up_after=0.2).start()\n"
        "    time.sleep(30)\n"
        "asyncio.run(stuck())\n"
    )
    began = time.monotonic()
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert process.returncode == 1 and time.monotonic() - began < 15
    assert "blocked" in process.stderr and "in stuck" in process.stderr
