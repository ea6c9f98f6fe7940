"""A real gateway on a real socket, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from agentrl.gateway import Gateway, GatewayAddress
from agentrl.session import ChatFormat, SamplingLimits, Session
from tests.support.scripted import ScriptedEngine

LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=1500, max_response_length=200, max_model_len=2000)


@contextlib.asynccontextmanager
async def served(gateway: Gateway) -> AsyncIterator[Gateway]:
    """Runs a gateway for the duration of a block."""
    running = asyncio.create_task(gateway.run())
    try:
        yield gateway
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled(), running.exception()


class Client:
    """An episode behind a gateway, and a client that has its key.

    Attributes:
        engine: scripted.
        session: of the episode; its graph is what would be trained.
        http: a client with the key.
    """

    def __init__(self, engine: Any, session: Session, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.session = session
        self.http = http

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The body of a chat completion, which must succeed."""
        response = await self.post("/v1/chat/completions", {"model": "m", "messages": list(messages), **fields})
        assert response.status_code == 200, response.text
        return response.json()


@contextlib.asynccontextmanager
async def episode(
    chat_format: ChatFormat, engine: Any, limits: SamplingLimits = LIMITS, **address: Any
) -> AsyncIterator[Client]:
    """One episode with its key. `engine` is an engine, or a script for one."""
    engine = engine if hasattr(engine, "generate") else ScriptedEngine(engine)
    async with served(Gateway(GatewayAddress(**address), model="policy")) as gateway:
        session = Session("e", chat_format, engine, limits, door=gateway)
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as http:
            try:
                yield Client(engine, session, http)
            finally:
                session.close()
