"""Engines that die and come back: who waits for them, what they are given first, and when nobody comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl import AgentLoop, Policy, Task
from agentrl.record import EngineError, PeerLost
from agentrl.record.protocols import EngineStats
from agentrl.rollout import RolloutWorker
from agentrl.rollout.publish import PublishCoordinator
from agentrl.rollout.router import Router
from agentrl.rollout.signal import Signal
from agentrl.session import ChatFormat
from tests.rollout.test_router import engine, ids, quick, request
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import (
    BUCKET,
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
from tests.support.scripted import Sampled, ScriptedEngine, says

RELOAD = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


async def reload(worker: RolloutWorker, version: int) -> None:
    """What the trainer does when weights are wanted: the same version once more."""
    await asyncio.wait_for(worker.weights_wanted(), 5)
    await worker.begin_publish(True)
    await worker.publish_bucket(BUCKET)
    assert (await worker.finish_publish(version)).engines == 1


class Silent(HeldEngine):
    """Its process is gone: it answers nothing. `back()`: another process is there, with the weights of version 0."""

    gone = False

    def die(self) -> None:
        self.gone = True
        self.let_go()
        self.before_token = self._never

    def back(self) -> None:
        self.gone, self.version, self.before_token = False, 0, None
        self.calls.clear()

    async def stats(self) -> EngineStats:
        if self.gone:
            await asyncio.Event().wait()
        return await super().stats()

    async def _never(self, request: object, position: int) -> None:
        await asyncio.Event().wait()


@asynchronous
async def test_a_request_waits_for_the_only_engine_while_it_comes_back() -> None:
    first = engine()
    router = Router({"one": first}, Signal())
    call = asyncio.ensure_future(router.generate(request()))
    await until(lambda: bool(first.held))
    router.ended("one", restarting=True)
    await settle()
    assert not call.done() and first.running == 0 and router.alive and router.serving == []
    replica = router.replaced("one")
    await settle()
    assert not call.done(), "it does not answer yet"
    router.started(replica)
    assert router.joining == [replica]
    await settle()
    assert not call.done(), "it has no weights yet"
    first.before_token = None
    router.serve(replica, 0)
    assert (await call).token_ids.tolist() == [5, 9]
    assert ids(first) == ["g0.0:0", "g0.0:0"], "from the beginning"


@asynchronous
async def test_a_request_does_not_wait_where_another_engine_serves() -> None:
    one, two = engine(), quick()
    router = Router({"one": one, "two": two}, Signal())
    call = asyncio.ensure_future(router.generate(request()))
    await until(lambda: bool(one.held))
    router.ended("one", restarting=True)
    assert (await call).token_ids.tolist() == [5, 9]
    assert ids(two) == ["g0.0:0"]


@asynchronous
async def test_requests_fail_once_nobody_restarts_the_engine_they_wait_for() -> None:
    router = Router({"one": engine()}, Signal())
    router.ended("one", restarting=True)
    call = asyncio.ensure_future(router.generate(request()))
    await settle()
    assert not call.done()
    router.ended("one", restarting=False)
    with pytest.raises(EngineError, match="no engine is left"):
        await call
    assert not router.alive


@asynchronous
async def test_what_is_heard_of_a_process_that_is_gone_does_not_touch_its_successor() -> None:
    router = Router({"one": quick()}, Signal())
    old = router.replicas["one"]
    router.ended("one", restarting=True)
    router.fail(old, "silence")
    assert router.alive, "whether there is another one is for the host to say"
    new = router.replaced("one")
    router.started(new)
    router.fail(old, "silence")
    assert router.joining == [new]
    router.fail(new, "wrong checksum")
    assert not router.alive
    router.ended("one", restarting=True)
    assert router.alive, "the host knows better"


@asynchronous
async def test_an_answer_is_waited_for_only_as_long_as_the_engine_is_there() -> None:
    router = Router({"one": quick()}, Signal())
    replica = router.replicas["one"]
    assert await replica.ask(asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(PeerLost, match=r"no answer within 0\.01 s"):
        await replica.ask(asyncio.Event().wait(), 0.01)
    call = asyncio.ensure_future(replica.ask(asyncio.Event().wait()))
    await settle()
    router.ended("one", restarting=True)
    with pytest.raises(PeerLost, match="the engine is gone"):
        await call


@asynchronous
async def test_two_buckets_on_their_way_may_both_meet_the_end_of_an_engine() -> None:
    """The sender fills one bucket while the other one is read."""
    bad, good = Silent(lambda request: Sampled([5])), quick()
    router = Router({"bad": bad, "good": good}, Signal())
    coordinator = PublishCoordinator(router)
    await coordinator.begin()

    async def never(bucket: object) -> None:
        await asyncio.Event().wait()

    bad.update_weights = never  # type: ignore[method-assign]
    both = asyncio.gather(coordinator.bucket(BUCKET), coordinator.bucket(BUCKET))
    await settle()
    router.ended("bad", restarting=True)
    await both
    report = await coordinator.finish(1)
    assert (report.engines, good.calls) == (1, [*RELOAD[:2], *RELOAD[2:3] * 2, *RELOAD[3:]])


@asynchronous
async def test_an_engine_that_dies_after_its_last_step_does_not_enter_service() -> None:
    slow, dying = quick(), quick()
    router = Router({"slow": slow, "dying": dying}, Signal())
    coordinator = PublishCoordinator(router)
    await coordinator.begin()
    await coordinator.bucket(BUCKET)
    go_on = asyncio.Event()

    async def resume() -> None:
        await go_on.wait()

    slow.resume = resume  # type: ignore[method-assign]
    finishing = asyncio.ensure_future(coordinator.finish(1))
    await until(lambda: "resume" in dying.calls)
    router.ended("dying", restarting=True)
    new = router.replaced("dying")
    router.started(new)
    go_on.set()
    assert (await finishing).engines == 1
    assert [replica.name for replica in router.serving] == ["slow"]
    assert router.joining == [new], "the new process took no part, and still wants its weights"


@asynchronous
async def test_an_engine_that_comes_back_is_given_the_current_weights_and_the_run_goes_on(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    only = Silent(member_says(chat_format))
    config = rollout_config(tmp_path, "rollout.max_head_offpolicyness=1")
    worker = build_worker(config, chat_format, only, run_dir=tmp_path)
    async with asyncio.timeout(10), running(worker):
        await until(lambda: len(only.held) == 8)
        only.let_go("g0.")
        only.let_go("g1.")
        trained = await train(worker, 0)
        assert sorted(trained) == ["g0", "g1"]
        wanted = asyncio.ensure_future(worker.weights_wanted())
        only.die()
        await worker.engine_lost("engine-0", True)
        status = await worker.status()
        assert (status.engines, status.version) == (0, 1)
        assert status.generated_tokens == 8, "what the old process did stays counted"
        waiting = asyncio.ensure_future(worker.take_batch(1))
        await settle()
        only.back()
        await worker.engine_restarted("engine-0")
        await wanted
        assert "an engine is given its weights first" in (await worker.status()).waiting_for
        await reload(worker, 1)
        assert (only.calls, only.version, worker._gate.version) == (RELOAD, 1, 1)
        batch = await waiting
        assert batch.version == 1 and batch.metrics["staleness/lag_max"] <= 1
        assert (await worker.status()).generated_tokens >= 16
        assert "engine_error" not in (await worker.status()).fates


@asynchronous
async def test_an_engine_that_dies_again_before_it_has_its_weights(tmp_path: Path, chat_format: ChatFormat) -> None:
    only = Silent(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, only)
    async with asyncio.timeout(10), running(worker) as run:
        await until(lambda: len(only.held) == 8)
        only.die()
        await worker.engine_lost("engine-0", True)
        await worker.engine_restarted("engine-0")
        await settle()
        await worker.engine_lost("engine-0", True)
        only.back()
        await worker.engine_restarted("engine-0")
        await worker.weights_wanted()
        await worker.begin_publish(True)
        only.die()
        await worker.engine_lost("engine-0", True)
        with pytest.raises(EngineError, match="no engine accepted"):
            await worker.publish_bucket(BUCKET)
        assert not worker._router.joining
        await worker.engine_lost("engine-0", False)
        with pytest.raises(EngineError, match="no engine is left"):
            await worker.weights_wanted()
        with pytest.raises(EngineError, match="no engine is left"):
            await run


@asynchronous
async def test_weights_are_wanted_only_once_the_batch_that_was_taken_is_trained(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    """Between two publications the engine gets newer weights, and the batch would be a version older."""
    engines = {name: Silent(member_says(chat_format)) for name in ("engine-0", "engine-1")}
    one, two = engines.values()
    config = rollout_config(tmp_path, "async_training.trigger_parameter_sync_step=2")
    worker = build_worker(config, chat_format, engines)
    async with asyncio.timeout(10), running(worker):
        await until(lambda: len(one.held) + len(two.held) == 16)
        one.let_go()
        two.let_go()
        two.before_token = None
        batch = await worker.take_batch(0)
        one.die()
        await worker.engine_lost("engine-0", True)
        one.back()
        await worker.engine_restarted("engine-0")
        await until(lambda: bool(worker._router.joining))
        wanted = asyncio.ensure_future(worker.weights_wanted())
        await settle()
        assert not wanted.done()
        await worker.acknowledge(batch.id)
        await wanted
        taking = asyncio.ensure_future(worker.take_batch(0))
        await settle()
        assert not taking.done(), "no batch is formed of the old version any more"
        await publish(worker, 1)
        assert (await taking).version == 1


@asynchronous
async def test_an_update_that_breaks_off_lets_batches_be_formed_again(tmp_path: Path, chat_format: ChatFormat) -> None:
    subject = ScriptedEngine(member_says(chat_format))
    other = ScriptedEngine(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, {"one": subject, "two": other})
    async with running(worker):
        await until(lambda: len(worker._buffer) == 4)
        await worker.begin_publish()
        taking = asyncio.ensure_future(worker.take_batch(0))
        await settle()
        assert not taking.done()
        subject.failures["update_weights"] = other.failures["update_weights"] = PeerLost("gone")
        with pytest.raises(EngineError, match="no engine accepted"):
            await worker.publish_bucket(BUCKET)
        assert len((await taking).groups) == 2


@asynchronous
async def test_without_partial_rollout_an_update_does_not_wait_for_what_waits_for_an_engine(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    only = Silent(member_says(chat_format))
    config = rollout_config(tmp_path, "async_training.partial_rollout=false")
    worker = build_worker(config, chat_format, only, run_dir=tmp_path)
    async with asyncio.timeout(10), running(worker):
        await until(lambda: len(only.held) == 8)
        only.let_go("g0.")
        only.let_go("g1.")
        batch = await worker.take_batch(0)
        await worker.acknowledge(batch.id)
        beginning = asyncio.ensure_future(worker.begin_publish())
        await settle()
        assert not beginning.done()
        only.die()
        await worker.engine_lost("engine-0", True)
        with pytest.raises(EngineError, match="no engine is left to take the weights"):
            await beginning
        only.back()
        await worker.engine_restarted("engine-0")
        await worker.weights_wanted()
        await publish(worker, 1)
        batch = await worker.take_batch(1)
        assert {t.version_admitted for t in batch.trajectories} == {0}
        assert {t.oldest_version for t in batch.trajectories} == {1}
        await worker.acknowledge(batch.id)
    assert set(count_fates(read_fates(tmp_path))) <= {"trained", "cancelled"}


@asynchronous
async def test_the_status_of_a_run_does_not_wait_for_a_dead_engine(tmp_path: Path, chat_format: ChatFormat) -> None:
    only = Silent(member_says(chat_format))
    worker = build_worker(rollout_config(tmp_path), chat_format, only)
    async with asyncio.timeout(10), running(worker):
        await until(lambda: len(only.held) == 8)
        only.die()
        asking = asyncio.ensure_future(worker.status())
        await settle()
        assert not asking.done()
        await worker.engine_lost("engine-0", True)
        assert (await asking).engines == 0


@asynchronous
async def test_validation_goes_on_when_the_engine_is_back(tmp_path: Path, chat_format: ChatFormat) -> None:
    class Judge(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            return float((await policy.chat(task.messages())).text == "1")

    only = Silent(lambda request: says(chat_format, "1"))
    config = rollout_config(tmp_path, f"data.val={tmp_path / 'train.jsonl'}", tasks=3)
    worker = build_worker(config, chat_format, only, loop=Judge)
    validating = asyncio.ensure_future(worker.validate())
    await until(lambda: len(only.held) == 3)
    only.die()
    await worker.engine_lost("engine-0", True)
    only.back()
    await worker.engine_restarted("engine-0")
    await reload(worker, 0)
    report = await validating
    assert (report.episodes, report.failed, report.accuracy) == (3, 0, 1.0)
