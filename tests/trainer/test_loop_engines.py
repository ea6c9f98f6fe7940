"""Publications while engines fail, leave and come back, by a trainer with a scripted rollout side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.record import Batch, EngineError, WeightTransferError
from agentrl.record.protocols import PublishReport
from tests.support.asynchrony import settle, until
from tests.support.scripted_rollout import EngineLeft, same_weights

Fixture = Callable[..., Any]


def test_a_failed_publication_ends_the_run_with_its_error(new_loop: Fixture) -> None:
    loop, rollout, rows = new_loop()
    rollout.broken = True
    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(loop.run())
    assert loop.version == 0 and rows == []


def test_a_publication_that_no_engine_took_is_repeated_when_one_is_back(new_loop: Fixture) -> None:
    async def play() -> None:
        loop, rollout, rows = new_loop("trainer.total_steps=2", rollout=EngineLeft)
        rollout.away = True
        running = asyncio.create_task(loop.run())
        await until(lambda: "publish 1" in rollout.calls)
        await settle()
        assert loop.version == 0 and not running.done() and loop._phase == "publishing weights"
        rollout.wanted.set()
        await running
        assert [call for call in rollout.calls if call.startswith("publish")] == ["publish 1", "publish 1", "publish 2"]
        assert [row["policy_version"] for row in rows] == [0, 1]
        assert same_weights(loop._actor.model, rollout.engine)

    asyncio.run(play())


def test_engines_hear_that_a_publication_broke_off_on_the_senders_side(new_loop: Fixture) -> None:
    """The rollout side can't know: no engine failed. Without a word it would keep them paused for ever."""

    class Waiting(EngineLeft):
        async def abandon_publish(self, reason: str) -> None:
            await super().abandon_publish(reason)
            self.wanted.set()

    async def play() -> None:
        loop, rollout, rows = new_loop("trainer.total_steps=2", rollout=Waiting)
        send, failures = loop._sender.send, ["the group is closed"]

        async def fail_once(*arguments: Any) -> int:
            if failures:
                raise WeightTransferError(failures.pop())
            return await send(*arguments)

        loop._sender.send = fail_once
        await loop.run()
        assert [call for call in rollout.calls if call.startswith(("publish", "abandon"))] == [
            *("publish 1", "abandon: the group is closed"),
            *("publish 1", "publish 2"),
        ]
        assert len(rows) == 2 and same_weights(loop._actor.model, rollout.engine)

    asyncio.run(play())


@pytest.mark.parametrize(("sync", "call", "version"), [(1, "reload 1", 1), (2, "publish 1", 1)])
def test_an_engine_that_wants_weights_gets_those_of_now_while_the_trainer_waits_for_a_batch(
    new_loop: Fixture, sync: int, call: str, version: int
) -> None:
    """With weights newer than the last published ones that is a new version; else the same once more."""

    class Starved(EngineLeft):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.starving, self.fed = asyncio.Event(), asyncio.Event()

        async def take_batch(self, version: int) -> Batch:
            if self._taken == 1:
                self.starving.set()
                await self.fed.wait()
                version = self.version
            return await super().take_batch(version)

        async def finish_publish(self, version: int) -> PublishReport:
            if self.starving.is_set():
                self.fed.set()
            return await super().finish_publish(version)

    async def play() -> None:
        keys = ("trainer.total_steps=2", f"async_training.trigger_parameter_sync_step={sync}")
        loop, rollout, rows = new_loop(*keys, rollout=Starved)
        running = asyncio.create_task(loop.run())
        await rollout.starving.wait()
        before = loop.version
        rollout.wanted.set()
        await running
        assert rollout.calls.count(call) == 1
        assert before == (1 if sync == 1 else 0)
        assert [row["policy_version"] for row in rows] == [0, version]
        # After the early publication the count of steps begins anew: the last step's weights come with the end.
        assert rollout.calls[-1] == ("stop" if sync == 1 else "publish 2")
        assert same_weights(loop._actor.model, rollout.engine)

    asyncio.run(play())


def test_weights_that_an_engine_was_given_meanwhile_are_not_published_again(new_loop: Fixture) -> None:
    """An engine comes back while a batch is trained: it asks as soon as the batch is acknowledged."""

    class BackInTime(EngineLeft):
        async def acknowledge(self, batch_id: int) -> None:
            await super().acknowledge(batch_id)
            if batch_id == 1:
                self.wanted.set()
                await settle()

    loop, rollout, _ = new_loop("trainer.total_steps=2", rollout=BackInTime)
    asyncio.run(loop.run())
    assert [call for call in rollout.calls if call.startswith("publish")] == ["publish 1", "publish 2"]
    assert loop.version == 2 and same_weights(loop._actor.model, rollout.engine)
