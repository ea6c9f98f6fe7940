"""Calls between processes: a component on one side, something that looks like it on the other.

ZeroMQ carries MessagePack frames, decoded to the types that the component's Protocol declares. A call cancelled by
its caller is cancelled where it runs; an error arrives as the type it had; and no call waits for ever: a peer that
falls silent fails all calls waiting for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import traceback
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar, cast, get_type_hints

import zmq
import zmq.asyncio

from agentrl.record import PeerLost, errors
from agentrl.record.codec import decode, encode

P = TypeVar("P")
log = logging.getLogger(__name__)

_CALL, _CANCEL, _PING = b"call", b"cancel", b"ping"
_RESULT, _ERROR, _PONG = b"result", b"error", b"pong"
_PING_SECONDS = 1.0
RPC_SILENCE = 60.0
"""Seconds without a sign of life after which a peer is lost."""
_KNOWN_ERRORS = {name: getattr(errors, name) for name in errors.__all__} | {
    error.__name__: error for error in (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError)
}


class Signatures:
    """The argument and result types of a Protocol's methods."""

    def __init__(self, protocol: type) -> None:
        self.arguments: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        for name, method in inspect.getmembers(protocol, inspect.iscoroutinefunction):
            hints = get_type_hints(method)
            result = hints.pop("return", None)
            self._signatures[name] = inspect.signature(method)
            self.arguments[name] = tuple[tuple(hints.values())] if hints else tuple[()]  # type: ignore[misc]
            self.results[name] = result

    def __contains__(self, name: str) -> bool:
        return name in self._signatures

    def bind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call by position, defaults filled in.

        Raises:
            TypeError: they are not what the method takes.
        """
        bound = self._signatures[name].bind(None, *args, **kwargs)
        bound.apply_defaults()
        return bound.args[1:]


class RpcServer:
    """Serves the methods of `protocol` on `component` at a ZeroMQ address."""

    def __init__(self, address: str, component: object, protocol: type) -> None:
        self._component = component
        self._signatures = Signatures(protocol)
        self._calls: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    async def serve(self) -> None:
        """Answers until cancelled; running calls are cancelled with it."""
        try:
            async with asyncio.TaskGroup() as calls:
                while True:
                    peer, kind, number, *rest = await self._socket.recv_multipart()
                    if kind == _PING:
                        await self._socket.send_multipart([peer, _PONG, b""])
                    elif kind == _CALL:
                        call = calls.create_task(self._answer(peer, number, rest[0].decode(), rest[1]))
                        self._calls[peer, number] = call
                    elif kind == _CANCEL and (running := self._calls.get((peer, number))) is not None:
                        running.cancel()
        finally:
            self._socket.close()

    async def _answer(self, peer: bytes, number: bytes, name: str, payload: bytes) -> None:
        try:
            arguments = decode(payload, self._signatures.arguments[name])
            result = await getattr(self._component, name)(*arguments)
            reply = [peer, _RESULT, number, encode(result)]
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or not current.cancelling():
                reply = [peer, _ERROR, number, encode(("EngineError", "the call was cancelled", ""))]
            else:
                raise
        except Exception as error:  # noqa: BLE001  goes to the caller, type and all
            where = traceback.format_exc()
            reply = [peer, _ERROR, number, encode((type(error).__name__, str(error), where))]
        finally:
            self._calls.pop((peer, number), None)
        await self._socket.send_multipart(reply)


class RpcClient(Generic[P]):
    """The other end. `client.proxy` has the methods of `protocol`.

    Args:
        silence: seconds of unanswered pings after which a peer that has answered before is lost. Time in which this
            side did not listen, since its own event loop was held up, does not count.
        startup: the same for one that has not answered yet.
    """

    def __init__(
        self, address: str, protocol: type[P], *, name: str, silence: float = RPC_SILENCE, startup: float = 600.0
    ) -> None:
        self._signatures = Signatures(protocol)
        self._name = name
        self._silence = silence
        self._startup = startup
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._lost = ""
        self._answered = False
        self._silent = 0.0
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self.proxy = cast(P, _Proxy(self))

    async def run(self) -> None:
        """Receives answers and watches the peer, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch())
        finally:
            self._fail("the connection was closed")
            self._socket.close()

    async def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self._lost:
            raise PeerLost(f"{self._name}: {self._lost}")
        number = str(next(self._numbers)).encode()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._socket.send_multipart([_CALL, number, name.encode(), encode(arguments)])
            return decode(await future, self._signatures.results[name])
        except asyncio.CancelledError:
            if not self._socket.closed:
                await self._socket.send_multipart([_CANCEL, number])
            raise
        finally:
            self._waiting.pop(number, None)

    async def _receive(self) -> None:
        while True:
            kind, number, *rest = await self._socket.recv_multipart()
            self._silent = 0.0
            self._answered = True
            future = self._waiting.get(number)
            if kind == _PONG or future is None or future.done():
                continue
            if kind == _RESULT:
                future.set_result(rest[0])
            else:
                future.set_exception(_error(*decode(rest[0], tuple[str, str, str])))

    async def _watch(self) -> None:
        period = min(_PING_SECONDS, self._silence / 4)
        while True:
            await self._socket.send_multipart([_PING, b""])
            await asyncio.sleep(period)
            self._silent += period
            if not self._lost and self._silent > (self._silence if self._answered else self._startup):
                self._fail(f"no sign of life for {self._silent:.0f} s")

    def expect_new_peer(self) -> None:
        """Another process takes the peer's place at its address: it may take as long to answer as the first one."""
        self._fail("its process was started anew")
        self._lost = ""
        self._answered = False
        self._silent = 0.0

    def _fail(self, reason: str) -> None:
        self._lost = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._name}: {reason}"))


class _Proxy:
    def __init__(self, client: RpcClient[Any]) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        signatures = self._client._signatures
        if name not in signatures:
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._client.call(name, signatures.bind(name, args, kwargs))

        return call


def _error(kind: str, message: str, where: str) -> Exception:
    if kind in _KNOWN_ERRORS:
        error: Exception = _KNOWN_ERRORS[kind](message)
        error.add_note(f"in another process:\n{where}")
        return error
    return errors.RemoteError(f"{kind}: {message}\n{where}")


@contextlib.asynccontextmanager
async def connected(*clients: RpcClient[Any]) -> AsyncIterator[None]:
    """Runs clients for the duration of a block."""
    tasks = [asyncio.ensure_future(client.run()) for client in clients]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
