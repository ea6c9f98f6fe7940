"""How a signal that asks a program to end reaches a run, and what it does before and after one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.launch import Interrupted, interruptible

BOTH = [signal.SIGINT, signal.SIGTERM]
CLI = "import sys; sys.argv = ['agentrl', '--help']; from agentrl.cli import main; main()"


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_cancels_the_work_once(number: signal.Signals, tmp_path: Path) -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            cancelled.append(True)

    with pytest.raises(Interrupted, match=str(tmp_path)):
        interruptible(work(), tmp_path)
    assert cancelled == [True]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_after_the_work_leaves_its_result(number: signal.Signals, tmp_path: Path) -> None:
    async def work() -> int:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        return 3

    assert interruptible(work(), tmp_path) == 3


@pytest.mark.parametrize("number", BOTH)
def test_the_handlers_of_the_caller_come_back(number: signal.Signals, tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, _: received.append(number))
    try:
        interruptible(asyncio.sleep(0), tmp_path)
        os.kill(os.getpid(), number)
        assert received == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_while_python_ends_leaves_the_exit_status(number: signal.Signals) -> None:
    last = f"import atexit, os; atexit.register(os.kill, os.getpid(), {int(number)})"
    ended = subprocess.run([sys.executable, "-c", f"{last}; {CLI}"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_before_a_run_ends_the_command_without_a_traceback(number: signal.Signals) -> None:
    first = f"import os, typer; typer.Typer.__call__ = lambda *_: os.kill(os.getpid(), {int(number)})"
    ended = subprocess.run([sys.executable, "-c", f"{first}; {CLI}"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
