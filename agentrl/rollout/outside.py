"""Episodes that agents from outside play: handed out over HTTP, ended by a reward, a word, or silence."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.gateway_schema import GATEWAY_KEY
from agentrl.gateway import Gateway, GatewayAddress, NoCapacity, OpenedEpisode
from agentrl.record import AgentRLError, EnvError, Task
from agentrl.sdk import Reward
from agentrl.session import Session

_RETRY_SECONDS = 1.0
_HAND_OUT_SECONDS = 0.25
"""How long a client waits for an episode that may just be starting, before it is told to come again."""


class EpisodeTimeout(AgentRLError):
    """Nobody has used an episode for too long, or it runs for too long."""


class AgentFailed(AgentRLError):
    """An agent from outside says that it failed."""


@dataclass(eq=False, slots=True)
class _Offer:
    """An episode that waits for somebody to play it."""

    task: Task
    session: Session
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class OutsideEpisodes:
    """Implements `gateway.Desk`: the episodes that the dispatcher starts wait here for agents.

    They were admitted by the staleness gate like all others; there is none to hand out exactly when the gate is closed.
    One that nobody has asked for yet waits as long as it takes; one that was handed out ends as a time-out if its agent
    falls silent.

    Args:
        gateway: by which the agents use them.
        idle_timeout: seconds without a request.
        episode_timeout: seconds since it was handed out.
        over: why no episode will ever be handed out any more; empty while that is not so.
    """

    def __init__(
        self, gateway: Gateway, *, idle_timeout: float, episode_timeout: float, over: Callable[[], str]
    ) -> None:
        self._gateway = gateway
        self._idle_timeout = idle_timeout
        self._episode_timeout = episode_timeout
        self._over = over
        self._offers: deque[_Offer] = deque()
        self._offered = asyncio.Condition()

    async def open(self, wanted: Callable[[], bool] = lambda: True) -> OpenedEpisode:
        if not self._offers and not self._over():
            try:
                async with asyncio.timeout(_HAND_OUT_SECONDS), self._offered:
                    await self._offered.wait_for(lambda: bool(self._offers))
            except TimeoutError:
                pass
        if not self._offers or not wanted():
            if over := self._over():
                raise NoCapacity(f"there are no more episodes: {over}", 0)
            raise NoCapacity(
                "no episode may be started now: all that the staleness gate admits are being played or trained",
                _RETRY_SECONDS,
            )
        offer = self._offers.popleft()
        offer.taken.set()
        session = offer.session
        return OpenedEpisode(session.episode_id, session.api_key, asdict(offer.task))

    async def play(self, task: Task, session: Session) -> Reward:
        """Waits until somebody has played an episode; returns what they say it is worth.

        Raises:
            EpisodeTimeout: they fell silent, or took too long.
            AgentFailed, EnvError: they say why there is no reward.
        """
        offer = _Offer(task, session)
        self._offers.append(offer)
        async with self._offered:
            self._offered.notify()
        try:
            await offer.taken.wait()
        finally:
            if offer in self._offers:
                self._offers.remove(offer)
        await self._until_judged(session)
        assert session.verdict is not None
        return verdict_of(session)

    async def _until_judged(self, session: Session) -> None:
        episode = self._gateway.episode(session)
        end = time.monotonic() + self._episode_timeout
        while not session.judged.is_set():
            now = time.monotonic()
            idle_end = now + self._idle_timeout if episode.running else episode.last_used + self._idle_timeout
            if now >= end:
                raise EpisodeTimeout(f"ran longer than rollout.episode_timeout = {self._episode_timeout:g} s")
            if now >= idle_end:
                raise EpisodeTimeout(f"no request for gateway.idle_timeout = {self._idle_timeout:g} s")
            try:
                async with asyncio.timeout(min(end, idle_end) - now):
                    await session.judged.wait()
            except TimeoutError:
                continue


def verdict_of(session: Session) -> Reward:
    """What was said of an episode over HTTP.

    Raises:
        AgentFailed, EnvError: why it has no reward.
    """
    verdict = session.verdict
    assert verdict is not None
    if verdict.error:
        raise EnvError(verdict.error) if verdict.blameless else AgentFailed(verdict.error)
    return Reward(verdict.reward, verdict.parts, verdict.info)


def open_gateway(config: RunConfig, *, over: Callable[[], str]) -> tuple[Gateway, OutsideEpisodes | None]:
    """The gateway of a run, and where agents from outside get episodes, if they play them.

    Raises:
        AgentRLError: its port can't be had.
    """
    wanted = config.gateway
    address = GatewayAddress(
        host=wanted.host,
        port=wanted.port,
        public_url=wanted.public_url or "",
        key=os.environ.get(GATEWAY_KEY, ""),
        max_body=wanted.max_body_mb * 2**20,
    )
    gateway = Gateway(address, model=Path(config.model.path).name)
    outside: OutsideEpisodes | None = None
    if config.plays_outside:
        outside = OutsideEpisodes(
            gateway,
            idle_timeout=wanted.idle_timeout,
            episode_timeout=config.rollout.episode_timeout,
            over=over,
        )
        gateway.hand_out_episodes(outside)
    if outside is not None or wanted.port:
        try:
            gateway.open()
        except OSError as error:
            raise AgentRLError(f"the gateway can't listen on {wanted.host}:{wanted.port}: {error}") from error
    return gateway, outside
