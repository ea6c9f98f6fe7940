"""Which engine answers, and what happens to a request whose engine is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agentrl.cluster.rpc import RpcClient, RpcServer, connected
from agentrl.record import EngineDied, EngineError, PeerLost
from agentrl.record.protocols import Engine, GenerateRequest
from agentrl.rollout.publish import PublishCoordinator
from agentrl.rollout.router import Router
from agentrl.rollout.signal import Signal
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import HeldEngine
from tests.support.scripted import Sampled, ScriptedEngine


def request(request_id: str = "g0.0:0", *, min_version: int = 0) -> GenerateRequest:
    return GenerateRequest(request_id, np.array([1, 2], np.int32), 8, 1.0, (9,), 0, min_version)


def engine() -> HeldEngine:
    return HeldEngine(lambda request: Sampled([5, 9]))


def quick() -> ScriptedEngine:
    return ScriptedEngine(lambda request: Sampled([5, 9]))


def ids(subject: ScriptedEngine) -> list[str]:
    return [request.request_id for request in subject.requests]


@asynchronous
async def test_requests_go_to_the_least_loaded_engine() -> None:
    one, two = engine(), engine()
    router = Router({"one": one, "two": two}, Signal())
    calls = [asyncio.ensure_future(router.generate(request(f"g{i}.0:0"))) for i in range(6)]
    await until(lambda: len(one.held) + len(two.held) == 6)
    assert (len(one.held), len(two.held)) == (3, 3)
    two.let_go()
    await until(lambda: sum(call.done() for call in calls) == 3)
    calls.append(asyncio.ensure_future(router.generate(request("g9.0:0"))))
    await until(lambda: len(two.held) == 4)
    one.let_go()
    two.let_go()
    await asyncio.gather(*calls)


@asynchronous
async def test_an_episode_stays_with_the_engine_that_has_its_earlier_turns() -> None:
    one, two = quick(), quick()
    router = Router({"one": one, "two": two}, Signal())
    for turn in range(3):
        for episode in ("g0.0", "g0.1"):
            await router.generate(request(f"{episode}:{turn}"))
    for episode in ("g0.0", "g0.1"):
        assert sum(any(request_id.startswith(episode) for request_id in ids(subject)) for subject in (one, two)) == 1


@asynchronous
async def test_nothing_is_kept_of_an_episode_that_is_over() -> None:
    router = Router({"one": quick()}, Signal())
    await router.generate(request("g0.0:0"))
    router.forget("g0.0")
    router.forget("never seen")
    assert router._last == {}


@asynchronous
async def test_only_an_engine_with_new_enough_weights_answers() -> None:
    old, new = quick(), quick()
    new.version = 3
    router = Router({"old": old, "new": new}, Signal())
    [*router.replicas.values()][1].version = 3
    for turn in range(4):
        await router.generate(request(f"g{turn}.0:0", min_version=3))
    assert (len(old.requests), len(new.requests)) == (0, 4)
    with pytest.raises(EngineError, match="no engine has weights of version 4 or newer"):
        await router.generate(request(min_version=4))


@asynchronous
async def test_an_episode_leaves_its_engine_when_that_is_too_old() -> None:
    one, two = quick(), quick()
    router = Router({"one": one, "two": two}, Signal())
    await router.generate(request("g0.0:0"))
    home, other = (one, two) if one.requests else (two, one)
    other.version = 1
    next(replica for replica in router.replicas.values() if replica.engine is other).version = 1
    await router.generate(request("g0.0:1", min_version=1))
    assert (ids(home), ids(other)) == (["g0.0:0"], ["g0.0:1"])


@asynchronous
async def test_a_request_whose_engine_is_lost_begins_again_on_another() -> None:
    one, two = quick(), quick()
    one.failures["generate"] = PeerLost("silence")
    router = Router({"one": one, "two": two}, Signal())
    results = await asyncio.gather(*(router.generate(request(f"g{i}.0:0")) for i in range(4)))
    assert [result.token_ids.tolist() for result in results] == [[5, 9]] * 4
    assert (len(two.requests), [replica.name for replica in router.serving]) == (4, ["two"])


@asynchronous
async def test_requests_held_by_an_engine_that_leaves_service_turn_to_another() -> None:
    stuck, good = engine(), quick()
    router = Router({"stuck": stuck, "good": good}, Signal())
    call = asyncio.ensure_future(router.generate(request()))
    await until(lambda: bool(stuck.held))
    router.fail(next(iter(router.replicas.values())), "its update failed")
    assert (await call).token_ids.tolist() == [5, 9]
    assert ids(good) == ["g0.0:0"]
    await until(lambda: stuck.running == 0)


@asynchronous
async def test_without_any_engine_a_request_fails_and_everybody_is_told() -> None:
    changed = Signal()
    only = quick()
    only.lose()
    router = Router({"only": only}, changed)
    told = asyncio.ensure_future(changed.wait_until(lambda: not router.alive))
    with pytest.raises(EngineError, match="no engine is left"):
        await router.generate(request())
    await told
    assert router.serving == []


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad token"), KeyError("x")])
@asynchronous
async def test_whatever_goes_wrong_in_an_engine_is_an_engine_error(error: Exception) -> None:
    router = Router({"one": ScriptedEngine(lambda request: error)}, Signal())
    with pytest.raises(EngineError, match=f"engine one: {type(error).__name__}"):
        await router.generate(request())
    assert router.alive, "it refused a request, it is not gone"


@asynchronous
async def test_an_engine_that_cancels_a_request_does_not_cancel_the_agent() -> None:
    """Case 21."""

    async def cancel(_request: GenerateRequest) -> Sampled:
        raise asyncio.CancelledError

    router = Router({"one": ScriptedEngine(cancel)}, Signal())
    with pytest.raises(EngineError, match="cancelled request"):
        await router.generate(request())


@asynchronous
async def test_a_caller_that_is_cancelled_cancels_its_request() -> None:
    subject = engine()
    router = Router({"one": subject}, Signal())
    call = asyncio.ensure_future(router.generate(request()))
    await until(lambda: bool(subject.held))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: subject.running == 0)
    assert next(iter(router.replicas.values())).requests == set()


OUT_OF_MEMORY = EngineDied("the engine has failed: out of memory")


@asynchronous
async def test_a_request_whose_engine_died_begins_again_on_another() -> None:
    one, two = quick(), quick()
    one.failures["generate"] = OUT_OF_MEMORY
    router = Router({"one": one, "two": two}, Signal())
    results = await asyncio.gather(*(router.generate(request(f"g{i}.0:0")) for i in range(4)))
    assert [result.token_ids.tolist() for result in results] == [[5, 9]] * 4
    assert (len(two.requests), [replica.name for replica in router.serving]) == (4, ["two"])


@asynchronous
async def test_a_request_whose_only_engine_died_waits_for_what_the_host_says(tmp_path: Path) -> None:
    """The engine tells its callers first; then its process ends, which the host sees."""
    first = quick()
    first.failures["generate"] = OUT_OF_MEMORY
    address = f"ipc://{tmp_path}/engine"
    server = asyncio.create_task(RpcServer(address, first, Engine).serve())
    client = RpcClient(address, Engine, name="one")
    async with asyncio.timeout(10), connected(client):
        router = Router({"one": client.proxy}, Signal())
        call = asyncio.ensure_future(router.generate(request()))
        await until(lambda: not router.serving)
        await settle()
        assert not call.done() and router.alive
        router.ended("one", restarting=True)
        replica = router.replaced("one")
        del first.failures["generate"]
        router.started(replica)
        await settle()
        assert not call.done() and router.joining == [replica]
        router.serve(replica, 0)
        assert (await call).token_ids.tolist() == [5, 9]
    server.cancel()


@asynchronous
async def test_a_request_whose_engine_died_fails_once_the_host_starts_no_other() -> None:
    only = quick()
    only.failures["generate"] = OUT_OF_MEMORY
    router = Router({"one": only}, Signal())
    call = asyncio.ensure_future(router.generate(request()))
    await settle()
    assert not call.done()
    router.ended("one", restarting=False)
    with pytest.raises(EngineError, match="no engine is left"):
        await call
    with pytest.raises(PeerLost, match="out of memory"):
        await router.replicas["one"].ask(only.generate(request()))
    assert not router.alive, "what the host said counts, whatever is heard of the engine later"


@asynchronous
async def test_an_engine_that_dies_in_an_update_is_not_given_up_before_the_host_speaks() -> None:
    changed, only = Signal(), quick()
    only.failures["start_weight_update"] = OUT_OF_MEMORY
    router = Router({"one": only}, changed)
    told = asyncio.ensure_future(changed.wait_until(lambda: not router.serving))
    with pytest.raises(EngineError, match=r"no engine accepted the weight update: .*out of memory"):
        await PublishCoordinator(router).begin()
    await told
    assert router.alive
    router.ended("one", restarting=True)
    router.started(router.replaced("one"))
    assert [replica.name for replica in router.joining] == ["one"]
