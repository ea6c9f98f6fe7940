"""Requests for turns, in any of the APIs: read, sampled once however often they are asked for, and answered."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import msgspec
import xxhash
from aiohttp import web

from agentrl.gateway.dialect import Answered, Asked, Dialect, Known, new_id
from agentrl.gateway.episodes import Exchange, OpenEpisode, gone
from agentrl.gateway.errors import GatewayError, ended, refusal
from agentrl.record import Node

log = logging.getLogger(__name__)

_SIGN_OF_LIFE_SECONDS = 10.0
"""How often a stream that has nothing to say yet says so: proxies and clients give up on silent connections."""


class TurnHandler:
    """Answers requests in one API.

    Args:
        model: name under which the policy answers.
        told: what has been logged of things that clients ask for in vain; shared by all handlers.
    """

    def __init__(self, dialect: Dialect, model: str, told: set[str]) -> None:
        self._dialect = dialect
        self._model = model
        self._told = told
        self._seed = xxhash.xxh32_intdigest(dialect.id_prefix.encode())

    async def __call__(self, episode: OpenEpisode, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = self._dialect.read(body, Known(episode.session.limits, episode.conversations))
        self._warn(asked)
        exchange = self._exchange(episode, asked, request, body)
        return await self._deliver(exchange, asked, request)

    def _warn(self, asked: Asked) -> None:
        for name in asked.not_applied:
            if name not in self._told:
                self._told.add(name)
                log.warning("an agent sends %s, on which the run's config has the last word", name)

    def _exchange(self, episode: OpenEpisode, asked: Asked, request: web.Request, body: bytes) -> Exchange:
        """The exchange that a request begins, or repeats."""
        digest = xxhash.xxh3_64_intdigest(body, seed=self._seed)
        key = request.headers.get("Idempotency-Key", "")
        retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        exchange = episode.asked_before(digest, retried=retried, idempotency_key=key)
        if exchange is None:
            nodes: list[Node] = []
            exchange = Exchange(digest, key, asyncio.ensure_future(self._sample(episode, asked, nodes)), nodes)
            episode.begin(exchange)
        exchange.transports.append(request.transport)
        return exchange

    async def _sample(self, episode: OpenEpisode, asked: Asked, nodes: list[Node]) -> Answered:
        session = episode.session
        sampling = [asyncio.ensure_future(session.answer(asked.call, nodes)) for _ in range(asked.choices)]
        try:
            answers = await asyncio.gather(*sampling)
        finally:
            for sample in sampling:
                sample.cancel()
        texts = [session.token_texts(answer.node) for answer in answers] if asked.logprobs else []
        answered = Answered(new_id(self._dialect.id_prefix), int(time.time()), self._model, answers, texts)
        episode.answered(answered, asked.history)
        return answered

    async def _deliver(self, exchange: Exchange, asked: Asked, request: web.Request) -> web.StreamResponse:
        """Waits for an answer and writes it, whether its client is still there or not.

        Raises:
            Exception: why there is none, unless a stream has begun, which then says so.
        """
        work = exchange.work
        stream: web.StreamResponse | None = None
        while not work.done():
            await asyncio.wait({work}, timeout=_SIGN_OF_LIFE_SECONDS if asked.stream else None)
            if not work.done():
                stream = stream or await _begin_stream(request, asked)
                with suppress(ConnectionError):
                    await stream.write(self._dialect.sign_of_life)
        try:
            written = self._written(work, asked)
        except Exception as error:
            if stream is None:
                raise
            return await _finish(stream, self._dialect.error_event(logged(error)))
        if asked.stream:
            sent = await _finish(stream or await _begin_stream(request, asked), written)
        else:
            sent = await _send(request, written, asked)
        exchange.delivered = exchange.delivered or not gone(request.transport)
        return sent

    def _written(self, work: asyncio.Task[Answered], asked: Asked) -> bytes:
        """The answer as it goes over the wire."""
        if work.cancelled():
            raise ended()
        answered = work.result()
        if asked.stream:
            return b"".join(self._dialect.events(asked, answered))
        return msgspec.json.encode(self._dialect.body(asked, answered))


def logged(error: BaseException) -> GatewayError:
    """What a client is told of a failure; of one that nobody foresaw, the log says more."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return GatewayError(413, f"the request is too large: {error.text}", code="request_too_large")
    if isinstance(error, web.RequestPayloadError | ConnectionError):
        said = " ".join(str(error).split())
        close = {"Connection": "close"}  # aiohttp does so: where such a body ends is not known
        return GatewayError(400, f"the request's body can't be read: {said}", code="invalid_body", headers=close)
    refused = refusal(error)
    if refused.status == 500:
        log.error("a request failed", exc_info=error)
    return refused


async def _send(request: web.Request, body: bytes, asked: Asked) -> web.StreamResponse:
    """A whole answer; a client that is gone misses it."""
    response = web.Response(body=body, content_type="application/json", headers=_headers(asked))
    with suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
    return response


async def _begin_stream(request: web.Request, asked: Asked) -> web.StreamResponse:
    kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**kind, **_headers(asked)})
    with suppress(ConnectionError):
        await response.prepare(request)
    return response


async def _finish(response: web.StreamResponse, events: bytes) -> web.StreamResponse:
    """Writes all that is left of a stream; a client that is gone misses it."""
    with suppress(ConnectionError):
        await response.write(events)
        await response.write_eof()
    return response


def _headers(asked: Asked) -> dict[str, str]:
    return {"x-agentrl-not-applied": ", ".join(asked.not_applied)} if asked.not_applied else {}
