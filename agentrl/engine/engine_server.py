"""Calls of an engine that is an HTTP server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from agentrl.record import AgentRLError, EngineDied, EngineError


class EngineServer:
    """One that refuses a connection is gone; what it answers with an error is a failed call.

    Args:
        not_found: what to do about a server that has not the path it was asked for.
    """

    def __init__(self, url: str, *, not_found: str = "") -> None:
        self.url = url.rstrip("/")
        self._not_found = not_found
        # A connection for each call: one that is kept may be closed by the server in the moment it is used again.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float | None = None,
        refusal: type[AgentRLError] = EngineError,
    ) -> str:
        """Posts a body, or gets where there is none; returns the answer's text.

        Args:
            refusal: what it means if the server finds fault with the body (status 400).

        Raises:
            EngineDied: nobody is there.
            EngineError: the server answers with an error, or not in `seconds`.
        """
        where = self.url + path
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request("GET" if body is None else "POST", where, json=body) as response,
            ):
                text = await response.text()
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {seconds:g} s") from error
        except aiohttp.ClientConnectionError as error:
            raise EngineDied(f"{self.url} is gone: {error}") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status == 404 and self._not_found:
            raise EngineError(f"{self.url} has no {path.partition('?')[0]}: {self._not_found}")
        if response.status == 400:
            raise refusal(f"{where} answered 400: {text:.500}")
        if response.status > 400:
            raise EngineError(f"{where} answered {response.status}: {text:.500}")
        return text

    async def json(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float | None = None,
        refusal: type[AgentRLError] = EngineError,
    ) -> Any:
        """The same, for answers that are JSON objects; none is an empty one. One that says `success: false` is an error
        too."""
        text = await self.call(path, body, seconds=seconds, refusal=refusal)
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise EngineError(f"{self.url}{path} answered something that is not JSON: {text:.200}") from error
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise EngineError(f"{self.url}{path} answered {text:.500}")
        return answer

    async def close(self) -> None:
        """Ends the connections."""
        await self._session.close()
