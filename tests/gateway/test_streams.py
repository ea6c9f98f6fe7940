"""Streams that have to wait: they say that they live, and if it comes to that, why they end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.record import EngineError
from agentrl.session import ChatFormat
from tests.gateway.test_chat_completions import USER
from tests.support import sse
from tests.support.asynchrony import asynchronous, until
from tests.support.gateway import episode
from tests.support.rollout import HeldEngine
from tests.support.scripted import turns

APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 50},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.turns._SIGN_OF_LIFE_SECONDS", 0.05)


@pytest.mark.parametrize("path", APIS)
@asynchronous
async def test_a_stream_shows_that_it_lives_while_the_engine_works(chat_format: ChatFormat, path: str) -> None:
    engine = HeldEngine(turns(chat_format, "4"))
    async with episode(chat_format, engine) as client:
        body = {"model": "m", "stream": True, **APIS[path]}
        async with client.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            pieces = response.aiter_bytes()
            first = await anext(pieces)
            assert first in (b": waiting\n\n", b'event: ping\ndata: {"type":"ping"}\n\n')
            engine.let_go()
            rest = b"".join([piece async for piece in pieces])
        read = {"completions": sse.completion, "responses": sse.response, "messages": sse.message}
        assert read[path.rpartition("/")[2]]((first + rest).decode())


@pytest.mark.parametrize("path", APIS)
@asynchronous
async def test_a_failure_after_the_stream_has_begun_is_an_event(chat_format: ChatFormat, path: str) -> None:
    async def fail(request: Any) -> Any:
        await asyncio.sleep(0.1)
        return EngineError("it is gone")

    async with episode(chat_format, fail) as client:
        response = await client.post(path, {"model": "m", "stream": True, **APIS[path]})
        assert response.status_code == 200
        name, data = sse.parse(response.text)[-1]
        assert "it is gone" in data["error"]["message"]
        assert name == ("" if path.endswith("completions") else "error")


@pytest.mark.parametrize("path", APIS)
@asynchronous
async def test_a_failure_before_that_is_a_status(chat_format: ChatFormat, path: str) -> None:
    async with episode(chat_format, lambda request: EngineError("it is gone")) as client:
        response = await client.post(path, {"model": "m", "stream": True, **APIS[path]})
        assert response.status_code == 503
        assert "it is gone" in response.json()["error"]["message"]


@asynchronous
async def test_the_end_of_the_episode_ends_a_stream(chat_format: ChatFormat) -> None:
    engine = HeldEngine(turns(chat_format, "4"))
    async with episode(chat_format, engine) as client:
        body = {"model": "m", "stream": True, "messages": [USER]}
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", body))
        await until(lambda: len(engine.held) == 1)
        await asyncio.sleep(0.1)
        client.session.close()
        _, data = sse.parse((await asking).text)[-1]
        assert "its episode has ended" in data["error"]["message"]
