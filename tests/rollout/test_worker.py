"""The rollout side as a whole, from the data to the batch: real parts around a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl import AgentLoop, EnvError, Policy, Task
from agentrl.record import ContextOverflow, EngineError, Fate, NoProgress, RolloutEnded, load
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import (
    HeldEngine,
    build_worker,
    count_fates,
    member_says,
    publish,
    read_fates,
    rollout_config,
    running,
    train,
)
from tests.support.scripted import ScriptedEngine, member_number, says, turns


@asynchronous
async def test_a_batch_holds_whole_groups_and_its_episodes_end_as_trained(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    worker = build_worker(
        rollout_config(tmp_path), chat_format, ScriptedEngine(member_says(chat_format)), run_dir=tmp_path
    )
    async with running(worker):
        batch = await worker.take_batch(0)
        assert [group.id for group in batch.groups] == ["g0", "g1"]
        assert [[t.reward for t in group.trajectories] for group in batch.groups] == [[1.0, 0.0]] * 2
        assert (await worker.status()).fates == {}
        await worker.acknowledge(batch.id)
        assert (await worker.status()).fates == {"trained": 4}
    rows = read_fates(tmp_path)
    assert count_fates(rows)["trained"] == 4
    first = next(row for row in rows if row["episode_id"] == "g0.0")
    assert (first["task_id"], first["dataset_index"], first["fate"]) == ("train-0", 0, "trained")
    assert (first["version_admitted"], first["version_oldest"], first["reward"], first["turns"]) == (0, 0, 1.0, 1)
    assert [t.episode_id for t in load(tmp_path / "trajectories")] == ["g0.0", "g0.1", "g1.0", "g1.1"]


@asynchronous
async def test_the_metrics_of_a_batch_count_each_episode_once(tmp_path: Path, chat_format: ChatFormat) -> None:
    worker = build_worker(rollout_config(tmp_path), chat_format, ScriptedEngine(member_says(chat_format)))
    async with running(worker):
        metrics = (await worker.take_batch(0)).metrics
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["episode/count"]) == (0.5, 0.5, 4.0)
    assert (metrics["staleness/lag_max"], metrics["staleness/lag_mean"], metrics["episode/turns"]) == (0.0, 0.0, 1.0)
    assert {"queue/size", "time/wait_batch", "tokens/trained"} <= set(metrics)


@asynchronous
async def test_used_up_tasks_end_the_run_with_a_short_last_batch(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "rollout.max_head_offpolicyness=0", tasks=5)
    worker = build_worker(config, chat_format, ScriptedEngine(member_says(chat_format)), run_dir=tmp_path)
    async with running(worker):
        trained = [await train(worker, version) for version in range(3)]
        with pytest.raises(RolloutEnded, match="used up"):
            await worker.take_batch(3)
    assert trained == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert count_fates(read_fates(tmp_path)) == {"trained": 10}


@pytest.mark.parametrize("sync", [1, 2, 3])
@pytest.mark.parametrize("tasks", [1, 2, 4, 7])
@asynchronous
async def test_every_task_is_trained_once_whatever_the_schedule(
    tmp_path: Path, chat_format: ChatFormat, sync: int, tasks: int
) -> None:
    overrides = (f"async_training.trigger_parameter_sync_step={sync}", "async_training.staleness_threshold=0.5")
    config = rollout_config(tmp_path, *overrides, tasks=tasks)
    worker = build_worker(config, chat_format, ScriptedEngine(member_says(chat_format)), run_dir=tmp_path)
    version = steps = 0
    async with running(worker):
        while True:
            try:
                batch = await worker.take_batch(version)
            except RolloutEnded:
                break
            assert batch.metrics["staleness/lag_max"] <= 1
            await worker.acknowledge(batch.id)
            steps += 1
            if steps % sync == 0:
                version += 1
                await publish(worker, version)
    rows = read_fates(tmp_path)
    assert count_fates(rows) == {"trained": 2 * tasks}
    assert sorted({row["dataset_index"] for row in rows}) == list(range(tasks))


@asynchronous
async def test_a_batch_is_asked_for_under_the_published_version(tmp_path: Path, chat_format: ChatFormat) -> None:
    worker = build_worker(rollout_config(tmp_path), chat_format, ScriptedEngine(member_says(chat_format)))
    async with running(worker):
        with pytest.raises(ValueError, match="asked for version 1, but 0 is published"):
            await worker.take_batch(1)


class Unreliable(AgentLoop):
    """What becomes of an episode depends on its task."""

    async def run(self, task: Task, policy: Policy) -> Any:
        if task.index == 0:
            raise RuntimeError("bug")
        if task.index == 1:
            return 0.0  # no model call
        reply = await policy.chat(task.messages())
        if task.index == 2:
            raise EnvError("the sandbox died")
        if task.index == 3:
            raise EngineError("gone")
        if task.index == 4:
            raise ContextOverflow("too long")
        if task.index == 5:
            await asyncio.Event().wait()
        if task.index == 6 and reply.text == "0":
            raise asyncio.CancelledError
        if task.index == 7:
            return 0.5
        return float(reply.text)


@asynchronous
async def test_every_episode_has_one_fate_whatever_becomes_of_it(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "rollout.episode_timeout=0.5", tasks=10)
    worker = build_worker(
        config, chat_format, ScriptedEngine(member_says(chat_format)), loop=Unreliable, run_dir=tmp_path
    )
    async with running(worker):
        assert await train(worker, 0) == ["g8", "g9"]
        with pytest.raises(RolloutEnded):
            await worker.take_batch(1)
        status = await worker.status()
    expected = {
        "agent_error": 5,
        "env_error": 2,
        "engine_error": 2,
        "timeout": 2,
        "group_incomplete": 1,
        "filtered": 4,
        "trained": 4,
    }
    assert status.fates == count_fates(read_fates(tmp_path)) == expected
    assert status.dispatched == 20
    reasons = {row["fate"]: row["reason"] for row in read_fates(tmp_path)}
    assert {row["reason"] for row in read_fates(tmp_path) if row["fate"] == "filtered"} == {
        "all rewards are 0",  # nobody judged the episodes that grew too long
        "all rewards are 0.5",
    }
    assert reasons["group_incomplete"] == "1 of 2 members usable"
    assert reasons["timeout"] == "ran longer than rollout.episode_timeout = 0.5 s"


@asynchronous
async def test_a_group_with_a_failed_member_trains_with_the_rest(tmp_path: Path, chat_format: ChatFormat) -> None:
    """Case 8."""
    good = member_says(chat_format)
    engine = ScriptedEngine(lambda request: EngineError("gone") if member_number(request) == 2 else good(request))
    config = rollout_config(tmp_path, "rollout.n=4", "rollout.max_head_offpolicyness=0")
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        assert [[t.episode_id for t in group.trajectories] for group in batch.groups] == [
            ["g0.0", "g0.1", "g0.3"],
            ["g1.0", "g1.1", "g1.3"],
        ]
        assert batch.metrics["episode/failed"] == 2
        await worker.acknowledge(batch.id)
    assert count_fates(read_fates(tmp_path))["trained"] == 6


@asynchronous
async def test_a_filter_that_rejects_everything_ends_the_run_when_the_data_ends(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Case 17: the trainer does not wait for ever, and nothing is left running."""
    worker = build_worker(rollout_config(tmp_path, tasks=20), chat_format, ScriptedEngine(turns(chat_format, "1")))
    async with running(worker):
        with pytest.raises(RolloutEnded, match="used up"):
            await worker.take_batch(0)
        status = await worker.status()
    assert status.fates == {"filtered": 40}
    assert (status.running_episodes, status.queued_groups, status.in_flight) == (0, 0, 0)


@asynchronous
async def test_groups_that_never_train_end_an_endless_run_with_an_error(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Case 17 without an end of the data: the error says how the episodes ended."""
    config = rollout_config(
        tmp_path, "trainer.total_epochs=null", "trainer.total_steps=5", "rollout.max_untrainable_groups=12"
    )
    worker = build_worker(config, chat_format, ScriptedEngine(turns(chat_format, "1")))
    async with running(worker):
        with pytest.raises(NoProgress, match=r"the last 12 groups .* 24 episodes: all rewards are 1"):
            await worker.take_batch(0)
        assert (await worker.validate()).episodes == 0


@asynchronous
async def test_without_the_filter_equal_rewards_train(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "rollout.filter_zero_variance=false")
    worker = build_worker(config, chat_format, ScriptedEngine(turns(chat_format, "1")))
    async with running(worker):
        assert await train(worker, 0) == ["g0", "g1"]


@asynchronous
async def test_a_filtered_groups_place_is_refilled(tmp_path: Path, chat_format: ChatFormat) -> None:
    good, same = member_says(chat_format), says(chat_format, "1")
    engine = ScriptedEngine(lambda request: same if request.request_id.startswith("g0.") else good(request))
    worker = build_worker(rollout_config(tmp_path, "rollout.max_head_offpolicyness=0"), chat_format, engine)
    async with running(worker):
        batch = await worker.take_batch(0)
        assert [group.id for group in batch.groups] == ["g1", "g2"]
        assert batch.metrics["reward/mean"] == pytest.approx((2 * 1.0 + 2 * 0.5 + 2 * 0.5) / 6, abs=0.1)
        assert batch.metrics["episode/count"] == 6


@asynchronous
async def test_no_more_episodes_run_than_may(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path, "rollout.max_concurrent=5"), chat_format, engine)
    async with running(worker):
        await settle()
        assert engine.running == 4
        engine.let_go("g0")
        await until(lambda: len(engine.held) == 6)
        assert engine.running == 4


@asynchronous
async def test_no_more_groups_start_than_staleness_allows(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "async_training.staleness_threshold=0.5", tasks=50)
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine)
    async with running(worker):
        await settle()
        status = await worker.status()
        assert (status.running_groups, status.capacity, engine.running) == (3, 0, 6)


@asynchronous
async def test_stop_cancels_what_runs_and_the_trainer_is_told(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        waiting = asyncio.ensure_future(worker.take_batch(0))
        await until(lambda: len(engine.held) == 8)
        engine.let_go("g1")
        await settle()
        await worker.stop()
        with pytest.raises(RolloutEnded, match="the run has ended"):
            await waiting
        with pytest.raises(RolloutEnded):
            await worker.take_batch(0)
        assert engine.running == 0
        await worker.stop()
    assert count_fates(read_fates(tmp_path)) == {"cancelled": 8}


@asynchronous
async def test_a_run_that_is_cancelled_seals_its_episodes(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, engine, run_dir=tmp_path)
    async with running(worker) as run:
        await until(lambda: len(engine.held) == 8)
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
    assert count_fates(read_fates(tmp_path)) == {"cancelled": 8}


@asynchronous
async def test_a_cancelled_wait_for_a_batch_loses_nothing(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, engine)
    async with running(worker):
        waiting = asyncio.ensure_future(worker.take_batch(0))
        await until(lambda: len(engine.held) == 8)
        waiting.cancel()
        await settle()
        engine.let_go()
        assert [group.id for group in (await worker.take_batch(0)).groups] == ["g0", "g1"]


@asynchronous
async def test_a_bug_in_a_task_source_ends_the_run_with_its_error(
    tmp_path: Path, chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = build_worker(rollout_config(tmp_path), chat_format, ScriptedEngine(member_says(chat_format)))

    def broken() -> Any:
        yield Task("one", id="one")
        raise RuntimeError("the data is gone")

    monkeypatch.setattr(worker._dispatcher, "_schedule", broken())
    with pytest.raises(BaseExceptionGroup) as caught:
        await worker.run()
    assert caught.group_contains(RuntimeError, match="the data is gone")
    with pytest.raises(RolloutEnded):
        await worker.take_batch(0)


@asynchronous
async def test_the_loop_of_an_agent_sees_the_run_seed_in_no_two_requests_alike(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Case 9."""
    engine = ScriptedEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path, "trainer.total_epochs=2"), chat_format, engine)
    async with running(worker):
        await train(worker, 0)
        await train(worker, 1)
    assert len({request.seed for request in engine.requests}) == len(engine.requests) >= 8


def test_fates_are_those_of_the_design() -> None:
    assert " ".join(Fate) == (
        "trained stale filtered group_incomplete env_error engine_error agent_error timeout truncated cancelled "
        "superseded"
    )
