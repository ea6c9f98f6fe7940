"""The gateway itself: an aiohttp server in the event loop of the episodes it serves."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from agentrl.config.gateway_schema import is_loopback
from agentrl.gateway.anthropic_messages import Messages
from agentrl.gateway.chat_completions import ChatCompletions
from agentrl.gateway.control import Desk, NoCapacity, OpenedEpisode, read_end, read_reward
from agentrl.gateway.dialect import Dialect, Known
from agentrl.gateway.episodes import Keys, OpenEpisode, gone
from agentrl.gateway.errors import GatewayError, ended
from agentrl.gateway.openapi import document
from agentrl.gateway.responses import Responses
from agentrl.gateway.turns import TurnHandler, logged
from agentrl.session import Session, Verdict

_BACKLOG = 4096
_CHAT, _MESSAGES = ChatCompletions(), Messages()


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where the gateway is.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        public_url: how agents reach it, if not by host and port.
        key: opens episodes from outside (`POST /agentrl/episodes`).
        max_body: bytes of a request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str = ""
    key: str = ""
    max_body: int = 16 * 2**20


class Gateway:
    """Implements `session.Door`: sessions are let in, get a key and are reached by HTTP under it.

    The port is taken at the first use, and the server runs while `run` does. One key is one episode; it opens nothing
    once the episode has ended.

    Args:
        model: name under which the policy answers, whatever name a client asks for.
    """

    def __init__(self, address: GatewayAddress, *, model: str) -> None:
        self.model = model
        self._address = address
        self._desk: Desk | None = None
        self._keys = Keys()
        self._socket: socket.socket | None = None
        self._port = address.port
        self._wanted = asyncio.Event()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def url(self) -> str:
        """Where it is reached, without the path of any API."""
        self.open()
        if self._address.public_url:
            return self._address.public_url.rstrip("/")
        host = self._address.host
        host = socket.gethostname() if _is_everywhere(host) else f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._port}"

    def open(self) -> None:
        """Takes the port; clients that connect from now on wait until `run` serves them.

        Raises:
            OSError: the port can't be had.
        """
        if self._socket is None:
            self._socket = listen(self._address.host, self._address.port)
            self._port = self._socket.getsockname()[1]
            self._wanted.set()

    def hand_out_episodes(self, desk: Desk) -> None:
        """Agents from outside may ask for episodes.

        Raises:
            ValueError: those of other machines too, and without a key.
        """
        if not self._address.key and not is_loopback(self._address.host):
            raise ValueError(
                f"the gateway would listen on {self._address.host} and give episodes to anybody: set the environment "
                "variable AGENTRL_GATEWAY_KEY, or gateway.host to 127.0.0.1"
            )
        self._desk = desk

    def admit(self, session: Session) -> str:
        return self._keys.admit(session)

    def dismiss(self, session: Session) -> None:
        self._keys.dismiss(session)

    def episode(self, session: Session) -> OpenEpisode:
        """The open episode of a session that was let in."""
        return self._keys.of(session)

    async def run(self) -> None:
        """Serves, once somebody wants it, until cancelled."""
        try:
            await self._wanted.wait()
            # What aiohttp has to say of malformed requests repeats their headers, keys included.
            silent = logging.getLogger(f"{__name__}.http")
            silent.setLevel(logging.CRITICAL)
            runner = web.AppRunner(
                self._application(), logger=silent, access_log=None, handle_signals=False, shutdown_timeout=1.0
            )
            await runner.setup()
            try:
                assert self._socket is not None
                await web.SockSite(runner, self._socket, backlog=_BACKLOG).start()
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()
        finally:
            if self._socket is not None:
                self._socket.close()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self._address.max_body, middlewares=[_without_surprises])
        # Anthropic's clients put /v1 behind their base URL, OpenAI's do not: one base URL serves both.
        told: set[str] = set()
        for root in ("/v1", "/v1/v1"):
            for path, dialect in (("chat/completions", _CHAT), ("responses", Responses()), ("messages", _MESSAGES)):
                turns = TurnHandler(dialect, self.model, told)
                application.router.add_post(f"{root}/{path}", self._guarded(turns, dialect))
            application.router.add_post(f"{root}/messages/count_tokens", self._guarded(self._count_tokens, _MESSAGES))
            application.router.add_get(f"{root}/models", self._guarded(self._list_models, _CHAT))
            application.router.add_get(f"{root}/models/{{name:.+}}", self._guarded(self._show_model, _CHAT))
        application.router.add_post("/agentrl/reward", self._guarded(self._reward, _CHAT))
        application.router.add_post("/agentrl/episodes", self._open_episode)
        application.router.add_post("/agentrl/episodes/end", self._guarded(self._end_episode, _CHAT))
        application.router.add_get("/openapi.json", _openapi)
        application.router.add_get("/health", _health)
        return application

    async def _count_tokens(self, episode: OpenEpisode, request: web.Request) -> web.Response:
        asked = _MESSAGES.read_counted(await request.read(), Known(episode.session.limits, {}))
        return _json({"input_tokens": episode.session.count_tokens(asked.call)})

    async def _list_models(self, episode: OpenEpisode, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_model(self.model)], "has_more": False, "first_id": self.model})

    async def _show_model(self, episode: OpenEpisode, request: web.Request) -> web.Response:
        return _json(_model(request.match_info["name"]))

    async def _reward(self, episode: OpenEpisode, request: web.Request) -> web.Response:
        wanted = read_reward(await request.read())
        session = episode.session
        if wanted.response_id is None:
            session.judge(Verdict(wanted.reward, wanted.parts, wanted.info))
            return _json({"episode_id": session.episode_id})
        turns = episode.turns(wanted.response_id)
        if turns is None:
            raise GatewayError(
                404, f"response_id: this episode has no answer {wanted.response_id!r}", param="response_id"
            )
        for turn in turns:
            session.reward(wanted.reward, turn)
        return _json({"episode_id": session.episode_id, "turns": turns})

    async def _end_episode(self, episode: OpenEpisode, request: web.Request) -> web.Response:
        verdict = read_end(await request.read())
        own = _key(request).decode("utf-8", "replace")
        episode.session.judge(replace(verdict, error=verdict.error.replace(own, "(its key)")))
        return _json({"episode_id": episode.session.episode_id})

    async def _open_episode(self, request: web.Request) -> web.Response:
        try:
            opened = await self._opened(request)
        except Exception as error:  # noqa: BLE001  every failure has to reach the client
            return _refused(_CHAT, logged(error))
        return _json(
            {
                "episode_id": opened.episode_id,
                "api_key": opened.api_key,
                "base_url": self.base_url,
                "model": self.model,
                "task": opened.task,
            },
            status=201,
        )

    async def _opened(self, request: web.Request) -> OpenedEpisode:
        if self._desk is None:
            raise GatewayError(404, "this run plays its own episodes: start it with `agentrl serve`", code="no_desk")
        if self._address.key and not hmac.compare_digest(_key(request), self._address.key.encode()):
            raise GatewayError(401, "opening an episode takes the key of the gateway", code="invalid_api_key")
        await request.read()
        try:
            return await self._desk.open(lambda: not gone(request.transport))
        except NoCapacity as error:
            retry = {"Retry-After": f"{error.retry_after:g}"} if error.retry_after else {}
            status = 429 if retry else 410
            raise GatewayError(status, str(error), code="no_capacity", headers=retry) from None

    def _guarded(
        self, handle: Callable[[OpenEpisode, web.Request], Awaitable[web.StreamResponse]], dialect: Dialect
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """For those with a key; what goes wrong is told in the words of the API."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                episode = self._keys.find(_key(request))
                if episode is None:
                    raise ended()
                try:
                    return await handle(episode, request)
                finally:
                    episode.last_used = time.monotonic()
            except Exception as error:  # noqa: BLE001  every failure has to reach the client in its API's words
                return _refused(dialect, logged(error))

        return guarded


def listen(host: str, port: int) -> socket.socket:
    """A socket on which clients are heard, once somebody accepts them.

    Raises:
        OSError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _key(request: web.Request) -> bytes:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.encode("utf-8", "replace")


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "agentrl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def _refused(dialect: Dialect, error: GatewayError) -> web.Response:
    response = _json(dialect.error(error), error.status)
    response.headers.update(error.headers)
    return response


@web.middleware
async def _without_surprises(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What aiohttp itself refuses (unknown paths, wrong methods) is told as JSON too."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        response = _refused(_CHAT, GatewayError(error.status, message, code=error.reason.lower().replace(" ", "_")))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


async def _openapi(request: web.Request) -> web.Response:
    return _json(document())


async def _health(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


def _is_everywhere(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")
