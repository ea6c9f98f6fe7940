"""Answers that no verifier survives: they cost their time limit, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from agentrl.envs.math import Outcome, Verifier
from agentrl.envs.math.judge_pool import JudgePool, shared_pool
from agentrl.envs.math.judge_worker import MEMORY_LIMIT
from agentrl.record import EnvError
from tests.support.asynchrony import asynchronous

BOMBS = [
    "9999999!",
    "3^{1500000000}",
    "9^{9^{9^{9}}}",
    "((((9!)!)!)!)!",
    "\\binom{10^9}{5\\cdot 10^8}",
    "\\sum_{i=1}^{10^9} \\frac{1}{i}",
    "\\prod_{n=1}^{10^7} n",
    "\\frac{1}{9999999!}",
    "(x+1)^{100000}",
    "7^{8^{9}} + 1",
]
UNREASONABLE = [
    "(" * 900 + "1" + ")" * 900,
    "{" * 900 + "1" + "}" * 900,
    "\\sqrt{" * 250 + "2" + "}" * 250,
    "\\frac{" * 180 + "1" + "}{2}" * 180,
    "-" * 1900 + "1",
    "|" * 900 + "1",
    "^" * 900,
    "x" * 1900,
    "\\begin{pmatrix}" + "&".join("1" * 900) + "\\end{pmatrix}",
    "1" * 100_000,
]


@pytest.fixture
def pool() -> Iterator[JudgePool]:
    pool = JudgePool("math", 4)
    yield pool
    pool.close()
    assert workers() == set()


def workers(parent: int | None = None) -> set[int]:
    """Judging processes below a process, the dead but not yet reaped among them; those of the shared pool left out."""
    shared = set() if parent else set(shared_pool("math").process_ids())
    found = [child for child in psutil.Process(parent).children() if child.pid not in shared and _is_worker(child)]
    return {pid for worker in found for pid in (worker.pid, *_children(worker))}


def _children(process: psutil.Process) -> list[int]:
    try:
        return [child.pid for child in process.children()]
    except psutil.NoSuchProcess:
        return []


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "agentrl.envs.math.judge_worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


async def longest_gap(work: asyncio.Future[Any]) -> float:
    """The longest time for which the event loop did nothing else while `work` went on."""
    longest, last = 0.0, time.monotonic()
    while not work.done():
        await asyncio.sleep(0.002)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


@asynchronous
async def test_ten_bombs_at_once_leave_the_event_loop_alive(pool: JudgePool) -> None:
    verifier = Verifier(0.6, pool=pool)
    await verifier.verify("x", "y")
    work = asyncio.gather(*(verifier.verify("42", bomb) for bomb in BOMBS))
    assert await longest_gap(work) < 0.1
    for bomb, verdict in zip(BOMBS, await work, strict=True):
        assert (verdict.outcome, verdict.score) in [(Outcome.TIMEOUT, 0.0), (Outcome.ERROR, 0.0)], bomb
    assert sum(verdict.outcome is Outcome.TIMEOUT for verdict in await work) >= 8


@asynchronous
async def test_unreasonable_texts_earn_nothing_and_harm_nothing(pool: JudgePool) -> None:
    verifier = Verifier(0.6, pool=pool)
    verdicts = await asyncio.gather(*(verifier.verify("42", text) for text in UNREASONABLE))
    assert {verdict.score for verdict in verdicts} == {0.0}
    assert (await verifier.verify("x+1", "1+x")).outcome is Outcome.EQUAL


@asynchronous
async def test_memory_is_limited(pool: JudgePool) -> None:
    await Verifier(5.0, pool=pool).verify("x", "y")
    for process in workers():
        assert psutil.Process(process).rlimit(psutil.RLIMIT_AS) == (MEMORY_LIMIT, MEMORY_LIMIT)


@asynchronous
async def test_a_bomb_does_not_cost_a_restart(pool: JudgePool) -> None:
    verifier = Verifier(0.3, pool=pool)
    await verifier.verify("x", "y")
    before = pool.process_ids()
    began = time.monotonic()
    for _ in range(5):
        assert (await verifier.verify("42", "9999999!")).outcome is Outcome.TIMEOUT
    assert time.monotonic() - began < 4.0
    assert (await verifier.verify("x+1", "1+x")).outcome is Outcome.EQUAL
    assert pool.process_ids() == before


@asynchronous
async def test_an_answer_in_time_is_not_held_up_by_a_bomb(pool: JudgePool) -> None:
    verifier = Verifier(5.0, pool=pool)
    await asyncio.gather(*(verifier.verify(f"x+{i}", f"{i}+x") for i in range(8)))
    bomb = asyncio.ensure_future(verifier.verify("42", "9999999!"))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    assert (await verifier.verify("x+1", "1+x")).score == 1.0
    assert time.monotonic() - began < 2.0
    assert not bomb.done()
    bomb.cancel()


@asynchronous
async def test_a_worker_killed_from_outside_is_replaced(pool: JudgePool) -> None:
    verifier = Verifier(5.0, pool=pool)
    for _ in range(2):
        assert (await verifier.verify("x+1", "1+x")).score == 1.0
        for process in pool.process_ids():
            os.kill(process, signal.SIGKILL)
    assert (await verifier.verify("x+1", "1+x")).score == 1.0


@asynchronous
async def test_a_worker_killed_at_work_tries_again(pool: JudgePool) -> None:
    verifier = Verifier(3.0, pool=pool)
    await verifier.verify("x", "y")
    first = pool.process_ids()
    work = asyncio.ensure_future(verifier.verify("42", "9999999!"))
    await asyncio.sleep(0.3)
    os.kill(first[0], signal.SIGKILL)
    assert (await work).outcome is Outcome.TIMEOUT
    assert first[0] not in pool.process_ids()


def test_a_closed_pool_fails_what_waits_and_leaves_no_process() -> None:
    pool = JudgePool("math", 1)
    futures = [pool.submit({"gold": "42", "answer": "9999999!"}, 30.0) for _ in range(3)]
    time.sleep(0.2)
    pool.close()
    for future in futures:
        assert future.exception(timeout=5.0) is not None or future.result()["outcome"] == "error"
    assert workers() == set()
    with pytest.raises(EnvError, match="ended with the process"):
        pool.submit({}, 1.0)


def test_a_missing_package_says_what_to_install(pool: JudgePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.join(os.path.dirname(__file__), "without_math_verify"))
    with pytest.raises(EnvError, match=r"pip install 'agentrl\[math\]'"):
        asyncio.run(Verifier(5.0, pool=pool).verify("x+1", "1+x"))


SCRIPT = """
import asyncio, os, sys
from agentrl.envs.math import Verifier
from agentrl.envs.math.judge_pool import shared_pool

async def main():
    verifier = Verifier(60.0)
    await verifier.verify("x+1", "1+x")
    bombs = [asyncio.ensure_future(verifier.verify("42", "9999999!")) for _ in range(2)]
    while len(shared_pool("math").process_ids()) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print("busy", flush=True)
    if sys.argv[1] == "exit":
        return
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_process(end: str) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, end], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        busy = workers(process.pid)
        if end != "exit":
            process.send_signal(signal.Signals[end])
        process.wait(timeout=10)
    assert end == "exit" or len(busy) >= 2
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in busy):
        time.sleep(0.02)
    assert [pid for pid in busy if psutil.pid_exists(pid)] == []


def test_a_forked_process_has_workers_of_its_own() -> None:
    assert asyncio.run(Verifier().verify("x+1", "1+x")).score == 1.0
    child = os.fork()
    if child == 0:
        os._exit(0 if asyncio.run(Verifier().verify("x+2", "2+x")).score == 1.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(Verifier().verify("x+3", "3+x")).score == 1.0
