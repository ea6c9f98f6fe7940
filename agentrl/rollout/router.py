"""Sends each request to an engine that may serve it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from agentrl.record import EngineDied, EngineError, PeerLost
from agentrl.record.protocols import Engine, GenerateRequest, GenerateResult
from agentrl.rollout.signal import Signal

T = TypeVar("T")
log = logging.getLogger(__name__)


class State(Enum):
    """Where an engine is in its life."""

    SERVING = auto()
    RESTARTING = auto()
    """Its process ended, another one is on its way; or it is about to end, and the host has yet to say what follows."""
    JOINING = auto()
    """It runs, and waits for the current weights: newly started, or paused since an update failed."""
    GONE = auto()
    """It failed and nobody restarts it."""


@dataclass(slots=True, eq=False)
class Replica:
    """One process of an engine, and what is known of it; the process that takes its place is another replica.

    Attributes:
        changed: notified when it leaves service.
        version: of its weights, as last published to it.
        lost: set when it leaves service, for ever.
        failed_updates: in a row, until now.
        workers: processes that hold its weights; None until it was asked.
    """

    name: str
    engine: Engine
    changed: Signal
    version: int = 0
    state: State = State.SERVING
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[str] = field(default_factory=set)
    failed_updates: int = 0
    workers: int | None = None
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def id(self) -> str:
        """Tells it from the processes that were, or will be, in its place."""
        return f"{self.name}#{self.number}"

    async def ask(self, call: Awaitable[T], seconds: float | None = None) -> T:
        """An answer of the engine, waited for only as long as it is there.

        Raises:
            PeerLost: it left service meanwhile or does so now, or did not answer within so many seconds.
        """
        work = asyncio.ensure_future(call)
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait((work, lost), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise PeerLost("the engine is gone" if lost.done() else f"no answer within {seconds} s")
        except EngineDied as error:
            if not self.lost.is_set():
                log.error("engine %s leaves service, its process is about to end: %s", self.name, error)
                self.leave(State.RESTARTING)
            raise PeerLost(str(error)) from error
        finally:
            work.cancel()
            lost.cancel()

    def leave(self, state: State) -> None:
        """Goes out of service, for that state."""
        self.state = state
        self.lost.set()
        self.changed.notify()


class Router:
    """Chooses among the engines whose weights are new enough: the one that has the episode's earlier turns, else
    the least loaded. A request whose engine is lost goes to another one, from its beginning; if the only engines that
    could serve it are on their way back, it waits for them. So it does where an engine has failed, until the host says
    what becomes of it.

    Args:
        changed: notified when an engine leaves or enters service.
    """

    def __init__(self, engines: Mapping[str, Engine], changed: Signal) -> None:
        self.replicas = {name: Replica(name, engine, changed) for name, engine in engines.items()}
        self._changed = changed
        self._last: dict[str, Replica] = {}

    @property
    def alive(self) -> bool:
        """Whether any engine takes requests, or will."""
        return any(replica.state is not State.GONE for replica in self.replicas.values())

    @property
    def serving(self) -> list[Replica]:
        """The engines that take requests."""
        return self._in(State.SERVING)

    @property
    def joining(self) -> list[Replica]:
        """The engines that wait for weights."""
        return self._in(State.JOINING)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """An engine's answer.

        Raises:
            EngineError: no engine may serve the request or ever will, or the one that did failed at it.
        """
        while True:
            replica = await self._choose(request)
            replica.requests.add(request.request_id)
            try:
                return await replica.ask(_answer(replica, request))
            except PeerLost as error:
                self.fail(replica, str(error))
            finally:
                replica.requests.discard(request.request_id)

    def fail(self, replica: Replica, reason: str) -> None:
        """Takes an engine out of service that does not do its work. Of one that is lost already this says nothing new:
        whether another process takes its place is for the host to say."""
        if replica.lost.is_set():
            return
        log.error("engine %s leaves service: %s", replica.name, reason)
        replica.leave(State.GONE)

    def rejoin(self, replica: Replica, reason: str) -> None:
        """Takes an engine out of service that is paused and has no whole set of weights, until it is given one. Its
        requests stay with it."""
        log.error("engine %s is out of service until it is given all weights: %s", replica.name, reason)
        replica.state = State.JOINING
        self._changed.notify()

    def ended(self, name: str, *, restarting: bool) -> None:
        """The process of an engine ended; `restarting`: another one is started in its place."""
        log.error("engine %s leaves service%s: its process ended", name, " for a while" if restarting else "")
        self.replicas[name].leave(State.RESTARTING if restarting else State.GONE)

    def replaced(self, name: str) -> Replica:
        """Another process was started in the place of one that ended; it does not answer yet."""
        self.replicas[name] = Replica(name, self.replicas[name].engine, self._changed, state=State.RESTARTING)
        return self.replicas[name]

    def started(self, replica: Replica) -> None:
        """It answers, without the current weights."""
        replica.state = State.JOINING
        self._changed.notify()

    def serve(self, replica: Replica, version: int) -> None:
        """It has the weights of `version` and takes requests."""
        if replica.state is State.JOINING:
            log.info("engine %s is back in service", replica.name)
        replica.state = State.SERVING
        replica.version = version
        replica.failed_updates = 0
        self._changed.notify()

    def forget(self, episode_id: str) -> None:
        """The episode is over: nothing more is to be kept for it."""
        self._last.pop(episode_id, None)

    async def _choose(self, request: GenerateRequest) -> Replica:
        def able() -> list[Replica]:
            return [replica for replica in self.serving if replica.version >= request.min_version]

        await self._changed.wait_until(lambda: bool(able()) or not (self.joining or self._in(State.RESTARTING)))
        if not able():
            if not self.serving:
                raise EngineError("no engine is left")
            raise EngineError(f"no engine has weights of version {request.min_version} or newer")
        episode_id = _episode(request)
        last = self._last.get(episode_id)
        chosen = last if last in able() else min(able(), key=lambda replica: len(replica.requests))
        self._last[episode_id] = chosen
        return chosen

    def _in(self, state: State) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state is state]


def _episode(request: GenerateRequest) -> str:
    """Requests are called `<episode>:<number>`, or `<episode>~<attempt>:<number>`."""
    return request.request_id.rpartition(":")[0].partition("~")[0]


async def _answer(replica: Replica, request: GenerateRequest) -> GenerateResult:
    try:
        return await replica.engine.generate(request)
    except (EngineError, PeerLost):
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineError(f"engine {replica.name} cancelled request {request.request_id}") from None
    except Exception as error:
        raise EngineError(f"engine {replica.name}: {type(error).__name__}: {error}") from error
