"""Calls over real sockets: typed both ways, cancellable both ways, and never waiting for a dead peer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

from agentrl.cluster.rpc import RpcClient, RpcServer, Signatures, connected
from agentrl.record import EngineError, GuideError, PeerLost, RolloutEnded, WeightTransferError
from agentrl.record.errors import RemoteError
from agentrl.record.protocols import Engine, GenerateRequest, GenerateResult, RolloutService, TrainerService


@dataclass(frozen=True, slots=True)
class Parcel:
    name: str
    array: np.ndarray
    parts: dict[str, float]
    shape: tuple[int, ...] = ()


class Service(Protocol):
    async def echo(self, parcel: Parcel) -> Parcel: ...

    async def add(self, a: int, b: int = 10, c: int = 100) -> int: ...

    async def nothing(self) -> None: ...

    async def fail(self, kind: str) -> int: ...

    async def hang(self) -> None: ...

    async def meet(self, number: int) -> int: ...

    async def wrong(self) -> int: ...


class Component:
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.together = asyncio.Barrier(20)

    async def echo(self, parcel: Parcel) -> Parcel:
        return parcel

    async def add(self, a: int, b: int = 10, c: int = 100) -> int:
        return a + b + c

    async def nothing(self) -> None:
        return None

    async def fail(self, kind: str) -> int:
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind == "own":
            raise type("SomethingElse", (Exception,), {})("in the component")
        raise {
            "engine": EngineError,
            "ended": RolloutEnded,
            "weights": WeightTransferError,
            "guide": GuideError,
            "value": ValueError,
        }[kind](f"{kind} failed")

    async def hang(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def meet(self, number: int) -> int:
        await self.together.wait()
        return number

    async def wrong(self) -> object:
        return object()

    async def private(self) -> int:
        return 1


@contextlib.asynccontextmanager
async def serving(address: str, component: Component, *, silence: float = 30.0) -> AsyncIterator[RpcClient[Service]]:
    server = asyncio.create_task(RpcServer(address, component, Service).serve())
    client = RpcClient(address, Service, name="the service", silence=silence)
    try:
        async with connected(client):
            yield client
    finally:
        server.cancel()
        await asyncio.wait([server])


def test_values_arrive_with_their_types(address: str) -> None:
    async def play() -> None:
        async with serving(address, Component()) as client:
            for array in (np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(2.5)):
                sent = Parcel("ä", array, {"x": 0.1, "nan": float("nan")}, (3, 4))
                back = await client.proxy.echo(sent)
                assert (back.name, back.shape, back.parts["x"]) == ("ä", (3, 4), 0.1)
                assert back.array.dtype == array.dtype and np.array_equal(back.array, array)
                assert np.isnan(back.parts["nan"])
            assert await client.proxy.nothing() is None

    asyncio.run(play())


def test_arguments_are_bound_as_python_binds_them(address: str) -> None:
    async def play() -> None:
        async with serving(address, Component()) as client:
            proxy: Any = client.proxy
            assert await proxy.add(1) == 111
            assert await proxy.add(1, 2) == 103
            assert await proxy.add(b=1, a=2) == 103
            assert await proxy.add(1, c=3) == 14
            for wrong in (lambda: proxy.add(), lambda: proxy.add(1, d=2), lambda: proxy.add(1, a=1)):
                with pytest.raises(TypeError):
                    await wrong()
            with pytest.raises(AttributeError, match="private"):
                await proxy.private()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("engine", EngineError),
        ("ended", RolloutEnded),
        ("weights", WeightTransferError),
        ("guide", GuideError),
        ("value", ValueError),
    ],
)
def test_an_error_arrives_as_the_type_it_had(kind: str, error: type[Exception], address: str) -> None:
    async def play() -> None:
        async with serving(address, Component()) as client:
            with pytest.raises(error) as caught:
                await client.proxy.fail(kind)
            assert type(caught.value) is error and str(caught.value) == f"{kind} failed"
            assert "in another process" in caught.value.__notes__[0]

    asyncio.run(play())


def test_other_failures_are_remote_errors_and_the_server_goes_on(address: str) -> None:
    async def play() -> None:
        async with serving(address, Component()) as client:
            with pytest.raises(RemoteError, match="SomethingElse: in the component"):
                await client.proxy.fail("own")
            with pytest.raises(EngineError, match="cancelled"):
                await client.proxy.fail("cancelled")
            with pytest.raises((RemoteError, TypeError, NotImplementedError), match="object"):
                await client.proxy.wrong()
            with pytest.raises(RemoteError, match="ValidationError"):
                await client.proxy.add("not a number")  # type: ignore[arg-type]
            with pytest.raises(KeyError):
                await client.call("private", ())
            assert await client.proxy.add(1) == 111

    asyncio.run(play())


def test_calls_run_at_the_same_time(address: str) -> None:
    async def play() -> None:
        async with serving(address, Component()) as client:
            calls = [client.proxy.meet(number) for number in range(20)]
            assert await asyncio.wait_for(asyncio.gather(*calls), timeout=10) == list(range(20))

    asyncio.run(play())


def test_a_cancelled_call_is_cancelled_where_it_runs(address: str) -> None:
    async def play() -> None:
        component = Component()
        async with serving(address, component) as client:
            call = asyncio.create_task(client.proxy.hang())
            await component.started.wait()
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            await asyncio.wait_for(component.cancelled.wait(), timeout=10)
            assert client._waiting == {}
            assert await client.proxy.add(1) == 111

    asyncio.run(play())


def test_a_server_that_ends_cancels_what_it_runs_and_its_callers_learn_of_it(address: str) -> None:
    async def play() -> None:
        component = Component()
        server = asyncio.create_task(RpcServer(address, component, Service).serve())
        client = RpcClient(address, Service, name="the service", silence=0.5)
        async with connected(client):
            call = asyncio.create_task(client.proxy.hang())
            await component.started.wait()
            server.cancel()
            await asyncio.wait([server])
            assert server.cancelled() and component.cancelled.is_set()
            with pytest.raises(PeerLost, match="the service: no sign of life"):
                await asyncio.wait_for(call, timeout=10)
            with pytest.raises(PeerLost):
                await client.proxy.add(1)

    asyncio.run(play())


def test_a_client_that_is_closed_fails_its_calls(address: str) -> None:
    async def play() -> None:
        component = Component()
        async with serving(address, component):
            other = RpcClient(address, Service, name="the service")
            async with connected(other):
                call = asyncio.create_task(other.proxy.hang())
                await component.started.wait()
            with pytest.raises(PeerLost, match="the connection was closed"):
                await asyncio.wait_for(call, timeout=10)

    asyncio.run(play())


@contextlib.contextmanager
def server_process(address: str) -> Iterator[int]:
    """A server in a process of its own (this file, run as a script); yields its pid."""
    process = subprocess.Popen([sys.executable, __file__, address])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_died_or_hangs_is_lost_within_the_silence(way: signal.Signals, address: str) -> None:
    async def play(pid: int) -> float:
        client = RpcClient(address, Service, name="the service", silence=1.0, startup=60.0)
        async with connected(client):
            assert await client.proxy.add(1) == 111
            call = asyncio.create_task(client.proxy.hang())
            assert await client.proxy.add(2) == 112
            os.kill(pid, way)
            began = time.monotonic()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(call, timeout=20)
            return time.monotonic() - began

    with server_process(address) as pid:
        assert 0.5 < asyncio.run(play(pid)) < 5


def test_a_peer_that_never_answered_is_given_the_time_to_start(address: str) -> None:
    async def play() -> None:
        client = RpcClient(address, Service, name="the service", silence=0.2, startup=60.0)
        async with connected(client):
            call = asyncio.create_task(client.proxy.add(1))
            await asyncio.sleep(0.5)
            assert not call.done()
            server = asyncio.create_task(RpcServer(address, Component(), Service).serve())
            assert await asyncio.wait_for(call, timeout=10) == 111
            server.cancel()
        late = RpcClient(address + "-none", Service, name="the service", silence=0.2, startup=0.4)
        async with connected(late):
            with pytest.raises(PeerLost, match="no sign of life"):
                await asyncio.wait_for(late.proxy.add(1), timeout=10)

    asyncio.run(play())


def test_a_process_that_takes_anothers_place_is_reached_at_its_address(address: str) -> None:
    """Calls to the old one fail; the new one may take its time to start, and what comes later reaches it."""

    async def play() -> None:
        client = RpcClient(address, Service, name="the service", silence=0.4, startup=60.0)
        async with connected(client):
            with server_process(address):
                assert await client.proxy.add(1) == 111
                old = asyncio.create_task(client.proxy.hang())
                assert await client.proxy.add(2) == 112
            with pytest.raises(PeerLost, match="no sign of life"):
                await asyncio.wait_for(old, timeout=10)
            with pytest.raises(PeerLost, match="no sign of life"):
                await client.proxy.add(3)
            client.expect_new_peer()
            early = asyncio.create_task(client.proxy.add(4))
            await asyncio.sleep(0.8)
            assert not early.done(), "a start may take longer than a silence"
            with server_process(address):
                assert await asyncio.wait_for(early, timeout=20) == 114
                pending = asyncio.create_task(client.proxy.hang())
                assert await client.proxy.add(5) == 115
            client.expect_new_peer()
            with pytest.raises(PeerLost, match="started anew"):
                await pending

    asyncio.run(play())


def test_a_caller_whose_own_loop_was_held_up_does_not_lose_its_peer(address: str) -> None:
    async def play() -> None:
        client = RpcClient(address, Service, name="the service", silence=0.4, startup=60.0)
        async with connected(client):
            assert await client.proxy.add(1) == 111
            time.sleep(1.5)  # noqa: ASYNC251  an agent that blocks the loop
            for _ in range(3):
                await asyncio.sleep(0.05)
                assert await client.proxy.add(2) == 112

    with server_process(address):
        asyncio.run(play())


@pytest.mark.parametrize("protocol", [Engine, RolloutService, TrainerService])
def test_the_protocols_of_a_run_can_be_called_over_sockets(protocol: type) -> None:
    signatures = Signatures(protocol)
    assert "status" in signatures or "stats" in signatures
    for name in signatures.arguments:
        assert name in signatures.results


def test_a_request_and_its_result_cross_unchanged(address: str) -> None:
    class Echo:
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            ids = request.token_ids
            return GenerateResult(request.request_id, ids, -ids.astype(np.float32), ids, "abort")

    async def play() -> None:
        server = asyncio.create_task(RpcServer(address, Echo(), Engine).serve())
        client = RpcClient(address, Engine, name="engine")
        async with connected(client):
            ids = np.arange(5, dtype=np.int32)
            result = await client.proxy.generate(GenerateRequest("r", ids, 1, 0.5, (1, 2), 2**62, 3))
            assert result.finish_reason == "abort" and result.request_id == "r"
            assert result.token_ids.dtype == np.int32 and result.logprobs.dtype == np.float32
            assert np.array_equal(result.versions, ids)
        server.cancel()

    asyncio.run(play())


async def _serve(address: str) -> None:
    await RpcServer(address, Component(), Service).serve()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
