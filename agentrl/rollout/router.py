"""Sends each request to an engine that may serve it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.record import EngineError, PeerLost
from agentrl.record.protocols import Engine, GenerateRequest, GenerateResult

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine and what is known of it.

    Attributes:
        version: of its weights, as last published to it.
        serving: false once it failed an update or a connection; only a full reload would bring it back.
    """

    name: str
    engine: Engine
    version: int = 0
    serving: bool = True
    requests: set[str] = field(default_factory=set)


class Router:
    """Chooses among the engines whose weights are new enough: the one that has the episode's earlier turns, else
    the least loaded. A request whose engine is lost goes to another one, from its beginning."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.replicas = [Replica(name, engine) for name, engine in engines.items()]
        self._last: dict[str, Replica] = {}

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
        while True:
            replica = self._choose(request)
            replica.requests.add(request.request_id)
            try:
                return await replica.engine.generate(request)
            except PeerLost as error:
                self.fail(replica, str(error))
            finally:
                replica.requests.discard(request.request_id)

    def fail(self, replica: Replica, reason: str) -> None:
        """Takes an engine out of service."""
        if replica.serving:
            log.error("engine %s leaves service: %s", replica.name, reason)
        replica.serving = False

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
