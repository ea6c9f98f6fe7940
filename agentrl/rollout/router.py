"""Sends each request to an engine that may serve it."""

from __future__ import annotations

import logging
from asyncio import FIRST_COMPLETED, CancelledError, Event, current_task, ensure_future, wait
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.record import EngineError, PeerLost
from agentrl.record.protocols import Engine, GenerateRequest, GenerateResult
from agentrl.rollout.signal import Signal

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine and what is known of it.

    Attributes:
        version: of its weights, as last published to it.
        lost: set once it failed an update or a connection; only a full reload would bring it back.
    """

    name: str
    engine: Engine
    version: int = 0
    lost: Event = field(default_factory=Event)
    requests: set[str] = field(default_factory=set)

    @property
    def serving(self) -> bool:
        return not self.lost.is_set()


class Router:
    """Chooses among the engines whose weights are new enough: the one that has the episode's earlier turns, else
    the least loaded. A request whose engine is lost goes to another one, from its beginning.

    Args:
        changed: notified when an engine leaves service.
    """

    def __init__(self, engines: Mapping[str, Engine], changed: Signal) -> None:
        self.replicas = [Replica(name, engine) for name, engine in engines.items()]
        self._changed = changed
        self._last: dict[str, Replica] = {}

    @property
    def alive(self) -> bool:
        """Whether any engine takes requests."""
        return any(replica.serving for replica in self.replicas)

    @property
    def serving(self) -> list[Replica]:
        """The engines that take requests.

        Raises:
            EngineError: none is left.
        """
        serving = [replica for replica in self.replicas if replica.serving]
        if not serving:
            raise EngineError("no engine is left")
        return serving

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """An engine's answer.

        Raises:
            EngineError: no engine may serve the request, or the one that did failed at it.
        """
        while True:
            replica = self._choose(request)
            replica.requests.add(request.request_id)
            call = ensure_future(_answer(replica, request))
            lost = ensure_future(replica.lost.wait())
            try:
                await wait((call, lost), return_when=FIRST_COMPLETED)
                if call.done():
                    return call.result()
            except PeerLost as error:
                self.fail(replica, str(error))
            finally:
                call.cancel()
                lost.cancel()
                replica.requests.discard(request.request_id)

    def fail(self, replica: Replica, reason: str) -> None:
        """Takes an engine out of service."""
        if replica.serving:
            log.error("engine %s leaves service: %s", replica.name, reason)
        replica.lost.set()
        self._changed.notify()

    def forget(self, episode_id: str) -> None:
        """The episode is over: nothing more is to be kept for it."""
        self._last.pop(episode_id, None)

    def _choose(self, request: GenerateRequest) -> Replica:
        able = [replica for replica in self.serving if replica.version >= request.min_version]
        if not able:
            raise EngineError(f"no engine has weights of version {request.min_version} or newer")
        episode_id = request.request_id.rpartition(":")[0]
        last = self._last.get(episode_id)
        chosen = last if last in able else min(able, key=lambda replica: len(replica.requests))
        self._last[episode_id] = chosen
        return chosen


async def _answer(replica: Replica, request: GenerateRequest) -> GenerateResult:
    try:
        return await replica.engine.generate(request)
    except (EngineError, PeerLost):
        raise
    except CancelledError:
        task = current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineError(f"engine {replica.name} cancelled request {request.request_id}") from None
    except Exception as error:
        raise EngineError(f"engine {replica.name}: {type(error).__name__}: {error}") from error
