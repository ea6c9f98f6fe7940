"""The episodes that keys open, and the requests each of them has had."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from agentrl.gateway.dialect import Answered
from agentrl.record import Message, Node
from agentrl.session import Session

_REMEMBERED = 64
"""Answered requests of an episode that are kept in case the client asks again."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A request and its answer, which outlive the connection that the request came on.

    Attributes:
        body: tells requests apart that are not the same.
        idempotency_key: the client's own word for which requests are the same, if it has one.
        work: makes the answer.
        nodes: the turns sampled for it so far, whether an answer comes of them or not.
        transports: of all connections on which it was asked for.
        delivered: the answer was written to one of them.
    """

    body: int
    idempotency_key: str
    work: asyncio.Task[Answered]
    nodes: list[Node]
    transports: list[asyncio.BaseTransport | None] = field(default_factory=list)
    delivered: bool = False

    @property
    def abandoned(self) -> bool:
        """Nobody has the answer, and nobody waits for it any more."""
        return not self.delivered and all(gone(transport) for transport in self.transports)


def gone(transport: asyncio.BaseTransport | None) -> bool:
    """Whether a client has closed its connection."""
    return transport is None or transport.is_closing()


class OpenEpisode:
    """A session that is used over HTTP.

    A client that gave up waiting and asks again gets the answer that is being made, or was made, for it: generation
    goes on when a connection ends. Two requests are taken for one only if the client says so (a retry counter or an
    idempotency key) or if nobody is left to take the first one's answer; otherwise equal requests are two samples, as
    parallel sub-agents want them.

    Attributes:
        conversations: by the id of an answer, everything said up to its end.
        last_used: when the last request was answered, by the monotonic clock.
        running: requests that are being answered.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.conversations: dict[str, list[Message]] = {}
        self.last_used = time.monotonic()
        self._exchanges: dict[int, list[Exchange]] = {}
        self._order: list[Exchange] = []
        self._turns: dict[str, list[Node]] = {}

    @property
    def running(self) -> int:
        return sum(not exchange.work.done() for exchange in self._order)

    def asked_before(self, body: int, *, retried: bool, idempotency_key: str) -> Exchange | None:
        """The exchange that a request repeats, if it does."""
        equal = [exchange for exchange in self._exchanges.get(body, ()) if not _failed(exchange)]
        if idempotency_key:
            named = [exchange for exchange in equal if exchange.idempotency_key == idempotency_key]
            if named:
                return named[-1]
        abandoned = [exchange for exchange in equal if exchange.abandoned]
        if abandoned:
            return abandoned[0]
        if retried:
            waiting = [exchange for exchange in equal if not exchange.delivered]
            return waiting[0] if waiting else equal[-1] if equal else None
        return None

    def begin(self, exchange: Exchange) -> None:
        """A new request."""
        self._exchanges.setdefault(exchange.body, []).append(exchange)
        self._order.append(exchange)
        self._forget_old()

    def answered(self, answered: Answered, history: list[Message]) -> None:
        """Remembers what an answer's id stands for."""
        self._turns[answered.id] = [answer.node for answer in answered.answers]
        if history:
            self.conversations[answered.id] = [*history, answered.answers[0].message]

    def turns(self, response_id: str) -> list[int] | None:
        """The numbers of an answer's turns within the episode; None if it has no such answer."""
        nodes = self._turns.get(response_id)
        if nodes is None:
            return None
        return [number for number, node in enumerate(self.session.graph.turns) if any(node is own for own in nodes)]

    def close(self) -> None:
        """The episode is over: what is still being sampled is given up, and what no client took is not trained."""
        for exchange in self._order:
            exchange.work.cancel()
            if not exchange.delivered:
                for node in exchange.nodes:
                    node.trained = False

    def _forget_old(self) -> None:
        for exchange in [exchange for exchange in self._order[:-_REMEMBERED] if exchange.delivered]:
            self._order.remove(exchange)
            equal = self._exchanges[exchange.body]
            equal.remove(exchange)
            if not equal:
                del self._exchanges[exchange.body]


def _failed(exchange: Exchange) -> bool:
    work = exchange.work
    return work.done() and (work.cancelled() or work.exception() is not None)


class Keys:
    """Which key opens which episode. A key consists of a public part, to find it by, and a secret one."""

    def __init__(self) -> None:
        self._episodes: dict[bytes, tuple[bytes, OpenEpisode]] = {}
        self._keys: dict[Any, bytes] = {}

    def admit(self, session: Session) -> str:
        """A new key for a session."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._keys[session] = name.encode()
        self._episodes[name.encode()] = (secret.encode(), OpenEpisode(session))
        return f"agentrl-{name}-{secret}"

    def dismiss(self, session: Session) -> None:
        """Its key opens nothing any more."""
        name = self._keys.pop(session, None)
        if name is not None:
            self._episodes.pop(name)[1].close()

    def of(self, session: Session) -> OpenEpisode:
        """The open episode of a session."""
        return self._episodes[self._keys[session]][1]

    def find(self, key: bytes) -> OpenEpisode | None:
        """The episode that a key opens; takes as long for a wrong secret as for the right one."""
        prefix, _, rest = key.partition(b"-")
        name, _, secret = rest.partition(b"-")
        expected, episode = self._episodes.get(name, (b"", None))
        same = hmac.compare_digest(secret, expected)
        return episode if same and prefix == b"agentrl" and expected else None
