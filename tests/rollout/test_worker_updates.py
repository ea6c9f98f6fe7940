"""What updates of the weights, and answers that grow stale meanwhile, do to a running rollout side."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import (
    BUCKET,
    HeldEngine,
    StragglingEngine,
    build_worker,
    member_says,
    publish,
    read_fates,
    rollout_config,
    running,
    train,
)


@asynchronous
async def test_without_partial_rollout_running_episodes_finish_before_the_update(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Case 16: no trajectory mixes versions."""
    overrides = ("rollout.max_head_offpolicyness=3", "rollout.max_concurrent=8")
    config = rollout_config(tmp_path, "async_training.partial_rollout=false", *overrides, tasks=20)
    engine = HeldEngine(member_says(chat_format), hold_at=1)
    worker = build_worker(config, chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        engine.let_go("g0")
        engine.let_go("g1")
        batch = await worker.take_batch(0)
        await worker.acknowledge(batch.id)
        await until(lambda: len(engine.held) == 12)
        beginning = asyncio.ensure_future(worker.begin_publish())
        engine.let_go("g2")
        await settle()
        assert not beginning.done(), "g3, g4 and g5 still run"
        assert (engine.calls, len(engine.held)) == ([], 12), "nobody is admitted meanwhile"
        engine.let_go()
        await beginning
        assert engine.running == 0
        await worker.publish_bucket(BUCKET)
        await worker.finish_publish(1)
        await until(lambda: len(engine.held) > 12)
        engine.let_go()
        batch = await worker.take_batch(1)
        assert batch.metrics["staleness/partial_ratio"] == 0
        assert batch.metrics["staleness/lag_max"] == 1


@asynchronous
async def test_with_partial_rollout_the_update_interrupts_and_tokens_carry_their_versions(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Case 16."""
    engine = HeldEngine(member_says(chat_format), hold_at=1)
    worker = build_worker(rollout_config(tmp_path), chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        engine.let_go("g0")
        engine.let_go("g1")
        batch = await worker.take_batch(0)
        await worker.acknowledge(batch.id)
        await publish(worker, 1)
        assert engine.calls == ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
        engine.let_go()
        batch = await worker.take_batch(1)
        for trajectory in batch.trajectories:
            (branch,) = trajectory.branches
            assert branch.versions[branch.loss_mask == 1].tolist() == [0, 1]
            assert (trajectory.version_admitted, trajectory.oldest_version, trajectory.status) == (0, 0, "completed")
        assert batch.metrics["staleness/partial_ratio"] == 1
        assert (batch.metrics["staleness/lag_max"], batch.metrics["staleness/lag_token_mean"]) == (1, 0.5)


@asynchronous
async def test_a_paused_engine_samples_nothing(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        await worker.begin_publish()
        engine.let_go()
        await settle()
        assert engine.generated == 0
        await worker.publish_bucket(BUCKET)
        await worker.finish_publish(1)
        batch = await worker.take_batch(1)
        assert {t.oldest_version for t in batch.trajectories} == {1}


@asynchronous
async def test_waiting_holds_the_trainer_until_the_straggler_that_falls_due_is_there(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    engine = StragglingEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path, tasks=20), chat_format, engine)
    async with running(worker):
        assert "g0" not in await train(worker, 0)
        waiting = asyncio.ensure_future(worker.take_batch(1))
        await settle()
        assert not waiting.done(), "at version 2 the group of version 0 would be stale"
        waiting_for = (await worker.status()).waiting_for
        assert "the oldest groups have to come first, version 0" in waiting_for and "the oldest is g0." in waiting_for
        engine.let_go()
        batch = await waiting
        assert [group.id for group in batch.groups] == ["g3", "g0"]
        assert batch.metrics["staleness/lag_max"] == 1


@asynchronous
async def test_dropping_lets_the_trainer_go_on_and_refills_the_place(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "async_training.on_stale=drop", tasks=20)
    engine = StragglingEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        for version in range(2):
            assert "g0" not in await train(worker, version)
        engine.let_go()
        for version in range(2, 4):
            assert "g0" not in await train(worker, version)
    stale = [row for row in read_fates(tmp_path) if row["fate"] == "stale"]
    assert [row["episode_id"] for row in stale] == ["g0.0", "g0.1"]
    assert stale[0]["reason"] == "2 versions behind, bound 1"
    assert (stale[0]["version_oldest"], stale[0]["version_ended"]) == (0, 2)


@asynchronous
async def test_when_all_that_is_queued_is_stale_its_places_are_refilled(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    overrides = (
        "async_training.on_stale=drop",
        "async_training.staleness_threshold=0.5",
        "rollout.max_head_offpolicyness=1",
        "actor.ppo_mini_batch_size=1",
        "async_training.trigger_parameter_sync_step=2",
    )
    engine = HeldEngine(member_says(chat_format), hold_at=1)
    worker = build_worker(rollout_config(tmp_path, *overrides, tasks=20), chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 6)
        for version in range(1, 3):
            await publish(worker, version)
        engine.let_go()
        await settle()
        waiting = asyncio.ensure_future(worker.take_batch(2))
        await until(lambda: len(engine.held) > 6)
        engine.let_go()
        assert (await waiting).metrics["staleness/lag_max"] == 0
        assert (await worker.status()).fates["stale"] == 6
