"""No wait is silent: what is waited for, for how long, and who holds it (case 41)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from agentrl.rollout.waits import WaitBoard
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import HeldEngine, build_worker, member_says, rollout_config, running, write_tasks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_reported_when_it_is_long_and_again_at_double_the_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = WaitBoard(first_report=60, clock=clock)
    held_by = ["g0.1"]
    with caplog.at_level(logging.WARNING), board.waiting("a batch", lambda: f"held by {held_by[0]}"):
        reported = []
        for second in range(1, 500):
            clock.now += 1
            held_by[0] = f"g{second}"
            board.report()
            if caplog.messages:
                reported.append((second, caplog.messages[0]))
                caplog.clear()
        assert [second for second, _ in reported] == [60, 120, 240, 480]
        assert reported[1][1] == "still waiting for a batch for 120 s; held by g120"
    clock.now += 10_000
    board.report()
    assert caplog.messages == [] and board.describe() == ""


def test_the_longest_wait_is_the_one_that_is_told() -> None:
    board = WaitBoard()
    with board.waiting("one", lambda: "a"), board.waiting("two", lambda: "b"):
        assert board.describe() == "one (a)"


def test_a_wait_that_fails_is_over() -> None:
    board = WaitBoard()
    with pytest.raises(ValueError, match="gone"), board.waiting("one", lambda: "a"):
        raise ValueError("gone")
    assert board.describe() == ""


@asynchronous
async def test_the_status_says_who_holds_the_next_batch(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        assert (await worker.status()).waiting_for == ""
        taking = asyncio.ensure_future(worker.take_batch(0))
        await settle()
        waiting_for = (await worker.status()).waiting_for
        assert waiting_for == (
            "a batch (2 more finished groups are needed, 0 queued, 4 groups of 8 episodes run, "
            "the oldest is g0.0 (task train-0, 0 s))"
        )
        engine.let_go()
        await taking
        assert (await worker.status()).waiting_for == ""


@asynchronous
async def test_the_status_says_what_an_update_and_a_validation_wait_for(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    val = write_tasks(tmp_path / "val.jsonl", 3)
    config = rollout_config(tmp_path, "async_training.partial_rollout=false", f"data.val={val}")
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        update = asyncio.ensure_future(worker.begin_publish())
        await settle()
        waiting_for = (await worker.status()).waiting_for
        assert waiting_for.startswith("running episodes to end before an update (4 groups of 8 episodes run")
        update.cancel()
        await settle()
        validation = asyncio.ensure_future(worker.validate())
        await until(lambda: len(engine.held) == 11)
        assert (await worker.status()).waiting_for == "held-out episodes (3 of 3 are left)"
        validation.cancel()
