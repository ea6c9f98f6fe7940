"""The staleness bound at the trainer's door, in every mode: a lag of H trains, one of H + 1 never does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import AgentLoop, Policy, Task
from agentrl.record import Batch, Branch, Group, RolloutEnded, Trajectory, Turn
from agentrl.rollout import RolloutWorker
from agentrl.rollout.batch_metrics import StaleShares, staleness_metrics
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import (
    HeldEngine,
    StragglingEngine,
    build_worker,
    count_fates,
    member_says,
    publish,
    read_fates,
    rollout_config,
    running,
    train,
)

MODES = ("wait", "drop", "requeue", "mask", "train")


def stale_config(folder: Path, mode: str, *overrides: str, bound: int = 1, tasks: int = 40) -> Any:
    keys = (f"async_training.on_stale={mode}", f"rollout.max_head_offpolicyness={bound}")
    return rollout_config(folder, *keys, *overrides, tasks=tasks)


def lag(batch: Batch) -> int:
    """Of the oldest token that is trained."""
    versions = np.concatenate([b.trained_versions for t in batch.trajectories for b in t.branches])
    if batch.min_version is not None:
        versions = versions[versions >= batch.min_version]
    return batch.version - int(versions.min())


async def run_ahead(worker: RolloutWorker, versions: int) -> None:
    """So many steps without the first group, which is held."""
    for version in range(versions):
        assert "g0" not in await train(worker, version)


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@asynchronous
async def test_a_lag_of_exactly_the_bound_trains(
    tmp_path: Path, chat_format: ChatFormat, mode: str, bound: int
) -> None:
    """Case 18."""
    engine = StragglingEngine(member_says(chat_format))
    worker = build_worker(stale_config(tmp_path, mode, bound=bound), chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        await run_ahead(worker, bound)
        engine.let_go()
        await until(lambda: "g0" in worker._buffer._groups)
        batch = await worker.take_batch(bound)
        assert "g0" in {group.id for group in batch.groups}
        assert lag(batch) == batch.metrics["staleness/lag_max"] == bound
        await worker.acknowledge(batch.id)
        assert set((await worker.status()).fates) == {"trained"}


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
@asynchronous
async def test_a_lag_of_one_more_does_not(tmp_path: Path, chat_format: ChatFormat, mode: str, bound: int) -> None:
    config = stale_config(tmp_path, mode, bound=bound)
    engine = StragglingEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        if mode == "wait" or not bound:
            for version in range(bound):
                await train(worker, version)
            waiting = asyncio.ensure_future(worker.take_batch(bound))
            await settle()
            assert not waiting.done(), "there is no batch without it: it can't fall behind"
            engine.let_go()
            assert lag(await waiting) == bound
            return
        await run_ahead(worker, bound + 1)
        engine.let_go()
        await until(lambda: "g0" in worker._buffer._groups)
        batch = await worker.take_batch(bound + 1)
        await worker.acknowledge(batch.id)
        assert lag(batch) == bound + 1 if mode == "train" else lag(batch) <= bound
        assert lag(batch) == batch.metrics["staleness/lag_max"]
        assert ("g0" in {group.id for group in batch.groups}) == (mode in ("train", "mask"))
    fates = {row["episode_id"]: row["fate"] for row in read_fates(tmp_path)}
    played_again = "cancelled"  # the run ended while it was played for the second time
    assert fates["g0.0"] == {"train": "trained", "mask": "trained", "drop": "stale", "requeue": played_again}[mode]


@pytest.mark.parametrize("mode", MODES)
@asynchronous
async def test_publishing_early_makes_finished_groups_stale_in_every_mode(
    tmp_path: Path, chat_format: ChatFormat, mode: str
) -> None:
    """Versions that nobody trained for: what an engine's return between two publications does."""
    keys = ("rollout.max_attempts=2", "async_training.trigger_parameter_sync_step=3")
    config = stale_config(tmp_path, mode, *keys, bound=0, tasks=6)
    worker = build_worker(config, chat_format, HeldEngine(member_says(chat_format)), run_dir=tmp_path)
    engine = worker._router.replicas["engine-0"].engine
    assert isinstance(engine, HeldEngine)
    async with running(worker):
        await until(lambda: len(engine.held) == 12)
        engine.let_go()
        await until(lambda: len(worker._buffer) == 6)
        engine.before_token = None
        await worker.acknowledge((await worker.take_batch(0)).id)
        await publish(worker, 1)
        batch = await asyncio.wait_for(worker.take_batch(1), 5) if mode not in ("drop", "mask") else None
        if batch is None:
            with pytest.raises(RolloutEnded):
                await worker.take_batch(1)
            assert (await worker.status()).fates == {"trained": 4, "stale": 8}
        else:
            assert lag(batch) == (1 if mode == "train" else 0)
            assert "stale" not in (await worker.status()).fates, "wait and requeue play them again"


@asynchronous
async def test_requeued_groups_are_played_again_as_the_same_episodes_until_their_attempts_are_used_up(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    engine = StragglingEngine(member_says(chat_format))
    config = stale_config(tmp_path, "requeue", "rollout.max_attempts=2", tasks=14)
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    version = 0
    async with running(worker):
        for attempt in (1, 2):
            key = "g0.0" if attempt == 1 else "g0.0~2"
            await until(lambda key=key: f"{key}:0" in engine.held)
            admitted = worker._ledger._open["g0.0"].version_admitted
            assert admitted == (0 if attempt == 1 else 2)
            while version < admitted + 2:
                assert "g0" not in await train(worker, version)
                version += 1
            dispatched = (await worker.status()).dispatched
            engine.let_go()
            await until(lambda: "g0" in worker._buffer._groups)
            batch = await worker.take_batch(version)
            assert "g0" not in {group.id for group in batch.groups}
            assert ("stale" in (await worker.status()).fates) == (attempt == 2)
            assert (await worker.status()).dispatched - dispatched <= 4, "no new episode stands for the old one"
            await worker.acknowledge(batch.id)
            version += 1
            await publish(worker, version)
        while True:
            try:
                await train(worker, version)
            except RolloutEnded:
                break
            version += 1
    rows = read_fates(tmp_path)
    assert count_fates(rows) == {"trained": 26, "stale": 2}
    stale = [row for row in rows if row["fate"] == "stale"]
    assert [(row["episode_id"], row["attempts"], row["version_admitted"]) for row in stale] == [
        ("g0.0", 2, 2),
        ("g0.1", 2, 2),
    ]


@asynchronous
async def test_a_requeued_group_is_played_and_trained_although_the_tasks_are_used_up(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    engine = StragglingEngine(member_says(chat_format))
    config = stale_config(tmp_path, "requeue", "rollout.max_attempts=3", tasks=6)
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        await run_ahead(worker, 2)
        engine.let_go()
        engine.before_token = None
        trained = [await train(worker, 2)]
        while True:
            try:
                trained.append(await train(worker, 2 + len(trained)))
            except RolloutEnded:
                break
        assert "g0" in trained[0] + trained[-1]
    rows = read_fates(tmp_path)
    assert count_fates(rows) == {"trained": 12}
    assert {row["episode_id"]: row["attempts"] for row in rows}["g0.1"] == 2


@asynchronous
async def test_a_member_without_any_young_token_counts_in_its_group_and_ends_as_stale(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Its agent takes its time after the model has said all it says."""
    slow, go_on = asyncio.Event(), asyncio.Event()

    class Slow(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            reply = await policy.chat(task.messages())
            if task.index == 0 and reply.text == "1":
                slow.set()
                await go_on.wait()
            return float(reply.text)

    engine = StragglingEngine(member_says(chat_format), prefix="g0.1")
    worker = build_worker(stale_config(tmp_path, "mask"), chat_format, engine, loop=Slow, run_dir=tmp_path)
    async with running(worker):
        await slow.wait()
        await run_ahead(worker, 2)
        engine.let_go()
        go_on.set()
        await until(lambda: "g0" in worker._buffer._groups)
        batch = await worker.take_batch(2)
        assert (batch.version, batch.min_version) == (2, 1)
        old, mixed = batch.groups[0].trajectories
        assert old.branches[0].trained_versions.tolist() == [0, 0]
        assert mixed.branches[0].trained_versions.tolist() == [0, 2]
        young = [t for group in batch.groups[1:] for t in group.trajectories]
        tokens = 1 + sum(t.sampled_tokens for t in young)
        assert batch.metrics["tokens/trained"] == tokens
        assert batch.metrics["staleness/masked_fraction"] == pytest.approx(3 / (tokens + 3))
        assert batch.metrics["staleness/lag_max"] == lag(batch) <= 1
        assert batch.metrics["staleness/stale_share/tokens_2"] > 0
        await worker.acknowledge(batch.id)
    fates = {row["episode_id"]: row for row in read_fates(tmp_path)}
    assert (fates["g0.0"]["fate"], fates["g0.1"]["fate"]) == ("stale", "trained")
    assert fates["g0.0"]["reason"] == "no token within the bound 1; counted in its group"


@asynchronous
async def test_a_group_without_any_young_token_is_stale_under_mask_too(tmp_path: Path, chat_format: ChatFormat) -> None:
    held = asyncio.Event()

    class Slow(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            reply = await policy.chat(task.messages())
            if task.index == 0:
                await held.wait()
            return float(reply.text)

    config = stale_config(tmp_path, "mask")
    worker = build_worker(config, chat_format, HeldEngine(member_says(chat_format), hold_at=-1), loop=Slow)
    async with running(worker):
        await run_ahead(worker, 2)
        held.set()
        await until(lambda: "g0" in worker._buffer._groups)
        batch = await worker.take_batch(2)
        assert "g0" not in {group.id for group in batch.groups}
        assert (await worker.status()).fates["stale"] == 2


def trajectory(name: str, versions: list[int]) -> Trajectory:
    size = len(versions)
    branch = Branch(
        np.zeros(size, np.int32),
        np.ones(size, np.uint8),
        np.zeros(size, np.float32),
        np.array(versions, np.int32),
        [Turn(0, size, 1.0, "stop")],
    )
    return Trajectory(name, "g", "t", 0, 0, [branch], 1.0, timings={"episode": 1.0})


def test_lags_are_those_of_trained_tokens() -> None:
    members = [trajectory("a", [1, 1, 4]), trajectory("b", [3, 3]), trajectory("c", [1])]
    batch = Batch(0, 4, [Group("g", members, 1)])
    metrics = staleness_metrics(batch)
    assert (metrics["staleness/lag_max"], metrics["staleness/lag_mean"]) == (3, (3 + 1 + 3) / 3)
    assert (metrics["tokens/trained"], metrics["staleness/lag_token_mean"]) == (6, (3 + 3 + 0 + 1 + 1 + 3) / 6)
    assert (metrics["staleness/lag_1"], metrics["staleness/lag_3"]) == (1 / 3, 2 / 3)
    batch.min_version = 2
    metrics = staleness_metrics(batch)
    assert (metrics["staleness/lag_max"], metrics["staleness/lag_mean"]) == (1, 0.5)
    assert (metrics["tokens/trained"], metrics["staleness/masked_fraction"]) == (3, 0.5)


def test_stale_shares_are_by_length() -> None:
    shares = StaleShares()
    assert shares.metrics() == {}
    shares.add(Batch(0, 4, [Group("g", [trajectory("a", [4] * 5), trajectory("b", [1] * 6)], 1)], min_version=3))
    shares.add_stale(Group("h", [trajectory("c", [0] * 64), trajectory("d", [0] * 7)], 0))
    assert shares.metrics() == {
        "staleness/stale_share/tokens_4": pytest.approx(2 / 3),
        "staleness/stale_share/tokens_64": 1.0,
    }
