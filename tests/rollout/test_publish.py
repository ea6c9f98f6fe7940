"""New weights to several engines: one that fails leaves service, the run goes on, and none stays paused (case 20)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.record import EngineError, PeerLost, RolloutEnded, WeightTransferError
from agentrl.record.protocols import Bucket, WeightGroup
from agentrl.rollout.publish import PublishCoordinator
from agentrl.rollout.router import Router
from agentrl.rollout.signal import Signal
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import BUCKET, HeldEngine, build_worker, member_says, publish, rollout_config, running, train
from tests.support.scripted import Sampled, ScriptedEngine

STEPS = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: Sampled([5]))


async def update(coordinator: PublishCoordinator, version: int) -> int:
    """One publication; how many engines took it."""
    await coordinator.begin()
    await coordinator.bucket(BUCKET)
    return (await coordinator.finish(version)).engines


@asynchronous
async def test_every_engine_goes_through_all_steps_in_order() -> None:
    engines = {"one": engine(), "two": engine()}
    router = Router(engines, Signal())
    assert await update(PublishCoordinator(router), 1) == 2
    assert [subject.calls for subject in engines.values()] == [STEPS, STEPS]
    assert [subject.version for subject in engines.values()] == [1, 1]
    assert [replica.version for replica in router.replicas.values()] == [1, 1]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error",
    [WeightTransferError("wrong checksum"), PeerLost("silence"), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
@asynchronous
async def test_an_engine_that_fails_leaves_service_and_the_other_goes_on(step: str, error: BaseException) -> None:
    bad, good = engine(), engine()
    bad.failures[step] = error
    router = Router({"bad": bad, "good": good}, Signal())
    coordinator = PublishCoordinator(router)
    assert await update(coordinator, 1) == 1
    assert [replica.engine for replica in router.serving] == [good]
    assert (good.calls, good.version) == (STEPS, 1)
    assert await update(coordinator, 2) == 1
    assert good.calls == STEPS * 2


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_an_engine_that_does_not_answer_in_time_leaves_service(step: str) -> None:
    class Slow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(lambda request: Sampled([5]))

    slow, good = Slow(), engine()

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    setattr(slow, step, never)
    router = Router({"slow": slow, "good": good}, Signal())
    assert await update(PublishCoordinator(router, timeout=0.01), 1) == 1
    assert [replica.engine for replica in router.serving] == [good]


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_without_any_engine_left_the_publication_fails(step: str) -> None:
    only = engine()
    only.failures[step] = WeightTransferError("wrong checksum")
    router = Router({"only": only}, Signal())
    coordinator = PublishCoordinator(router)
    for attempt in range(3):
        assert router.alive and len(router.joining) == (attempt > 0)
        with pytest.raises(EngineError, match="no engine accepted the weight update: wrong checksum"):
            await update(coordinator, 1)
    assert not router.alive, "an engine that fails again and again is given up"


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_an_engine_that_failed_once_is_back_with_the_next_whole_update(step: str) -> None:
    bad, good = engine(), engine()
    bad.failures[step] = WeightTransferError("wrong checksum")
    router = Router({"bad": bad, "good": good}, Signal())
    coordinator = PublishCoordinator(router)
    assert await update(coordinator, 1) == 1
    assert [replica.engine for replica in router.joining] == [bad]
    bad.failures.clear()
    await coordinator.begin(joining_only=True)
    await coordinator.bucket(BUCKET)
    assert (await coordinator.finish(1)).engines == 1
    assert len(router.serving) == 2 and bad.version == 1
    for version in range(2, 8):  # failures count in a row, not in all
        bad.failures = {step: WeightTransferError("wrong checksum")} if version % 2 else {}
        await update(coordinator, version)
    assert router.alive and len(router.serving) + len(router.joining) == 2


@asynchronous
async def test_the_receivers_are_named_anew_after_a_restart_and_ranks_follow_each_other() -> None:
    engines = {"one": engine(), "two": engine(), "three": engine()}
    engines["one"].workers, engines["two"].workers = 2, 4
    router = Router(engines, Signal())
    coordinator = PublishCoordinator(router)
    receivers = await coordinator.begin()
    assert receivers.workers == (2, 4, 1)
    await coordinator.join_weight_group(WeightGroup("group", "host:1", "gloo", 8, 1, 5.0))
    assert [subject.group.rank for subject in engines.values() if subject.group] == [1, 3, 7]
    router.ended("two", restarting=True)
    router.started(router.replaced("two"))
    again = await coordinator.begin()
    assert again.names[1] != receivers.names[1] and again.names[0] == receivers.names[0]


@asynchronous
async def test_a_publication_that_its_sender_leaves_is_made_again_for_all_engines() -> None:
    """A broadcast fails for everybody when one member dies: the others are not to blame, and must not stay paused."""
    engines = {"one": engine(), "two": engine()}
    router = Router(engines, Signal())
    coordinator = PublishCoordinator(router)
    await coordinator.begin()
    await coordinator.bucket(BUCKET)
    coordinator.abandon("the broadcast failed")
    assert router.serving == [] and len(router.joining) == 2
    assert await update(coordinator, 1) == 2
    assert [subject.version for subject in engines.values()] == [1, 1]
    assert [replica.failed_updates for replica in router.replicas.values()] == [0, 0]


@asynchronous
async def test_what_an_engine_says_of_an_abandoned_publication_does_not_count_for_the_next() -> None:
    class Slow(ScriptedEngine):
        async def update_weights(self, bucket: Bucket) -> None:
            await super().update_weights(bucket)
            if not late.is_set():
                await late.wait()
                raise WeightTransferError("the group is closed")

    late = asyncio.Event()
    slow = Slow(lambda request: Sampled([5]))
    router = Router({"slow": slow}, Signal())
    coordinator = PublishCoordinator(router)
    await coordinator.begin()
    bucket = asyncio.ensure_future(coordinator.bucket(BUCKET))
    await until(lambda: "update_weights" in slow.calls)
    coordinator.abandon("the broadcast failed")
    await coordinator.begin()
    late.set()
    with pytest.raises(EngineError, match="abandoned"):
        await bucket
    await coordinator.bucket(BUCKET)
    assert (await coordinator.finish(1)).engines == 1
    assert [replica.engine for replica in router.serving] == [slow]


@asynchronous
async def test_a_sender_that_fails_again_and_again_ends_with_an_error() -> None:
    router = Router({"one": engine()}, Signal())
    coordinator = PublishCoordinator(router)
    for _ in range(3):
        await coordinator.begin()
        coordinator.abandon("no room on the disk")
    assert not router.alive
    with pytest.raises(EngineError, match="no engine is left"):
        await coordinator.begin()


@asynchronous
async def test_the_run_goes_on_when_one_of_two_engines_fails_its_update(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    engines = {name: HeldEngine(member_says(chat_format)) for name in ("bad", "good")}
    bad, good = engines.values()
    worker = build_worker(rollout_config(tmp_path, tasks=6), chat_format, engines, run_dir=tmp_path)
    async with running(worker):
        await until(lambda: len(bad.held) + len(good.held) == 8)
        assert bad.running == good.running == 4
        bad.failures["finish_weight_update"] = WeightTransferError("wrong checksum")
        await publish(worker, 1)
        assert (await worker.status()).engines == 1
        bad.failures.clear()
        await asyncio.wait_for(worker.weights_wanted(), 1)
        await worker.begin_publish(True)
        await worker.publish_bucket(BUCKET)
        await worker.finish_publish(1)
        for subject in (bad, good):
            subject.before_token = None
            subject.let_go()
        assert len(await train(worker, 1)) == 2
        status = await worker.status()
        assert (status.engines, status.version) == (2, 2)
        assert len(bad.requests) >= 4 and bad.version == 2, "what it held waited for its weights and went on"
        while True:
            try:
                await train(worker, (await worker.status()).version)
            except RolloutEnded:
                break
        fates = (await worker.status()).fates
    assert fates == {"trained": 12}


@asynchronous
async def test_a_lost_engine_takes_no_requests_and_its_episodes_go_on(tmp_path: Path, chat_format: ChatFormat) -> None:
    engines = {name: HeldEngine(member_says(chat_format)) for name in ("bad", "good")}
    bad, good = engines.values()
    worker = build_worker(rollout_config(tmp_path), chat_format, engines)
    async with running(worker):
        await until(lambda: len(bad.held) + len(good.held) == 8)
        bad.lose()
        assert (await worker.status()).engines == 1
        await until(lambda: len(good.held) == 8)
        good.let_go()
        assert len(await train(worker, 0)) == 2
        assert "engine_error" not in (await worker.status()).fates


@asynchronous
async def test_when_the_last_engine_is_lost_the_run_ends_with_an_error(tmp_path: Path, chat_format: ChatFormat) -> None:
    only = HeldEngine(member_says(chat_format))
    config = rollout_config(tmp_path, "trainer.total_epochs=null", "trainer.total_steps=100")
    worker = build_worker(config, chat_format, only)
    async with running(worker) as run:
        waiting = asyncio.ensure_future(worker.take_batch(0))
        await until(lambda: bool(only.held))
        only.lose()
        await worker.status()
        await asyncio.wait([run, waiting])
        with pytest.raises(EngineError, match="no engine is left"):
            await run
        with pytest.raises(EngineError, match="no engine is left"):
            await waiting


@asynchronous
async def test_a_publication_that_no_engine_accepts_fails_and_ends_the_run(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    only = HeldEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, only)
    async with running(worker) as run:
        await until(lambda: bool(only.held))
        only.failures["update_weights"] = WeightTransferError("wrong checksum")
        for _ in range(3):
            await worker.begin_publish()
            with pytest.raises(EngineError, match="no engine accepted"):
                await worker.publish_bucket(BUCKET)
        with pytest.raises(EngineError):
            await run
        assert (await worker.status()).version == 0


@asynchronous
async def test_the_gate_opens_only_when_the_weights_are_there(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, "rollout.max_head_offpolicyness=0", tasks=10)
    subject = ScriptedEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, subject)
    async with running(worker):
        batch = await worker.take_batch(0)
        await worker.acknowledge(batch.id)
        await worker.begin_publish()
        await worker.publish_bucket(BUCKET)
        await settle()
        assert len(subject.requests) == 4
        await worker.finish_publish(1)
        await until(lambda: len(subject.requests) == 8)
        assert {request.min_version for request in subject.requests[4:]} == {1}
