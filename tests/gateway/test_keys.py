"""Who gets in."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import httpx
import pytest

from agentrl.gateway import Gateway, GatewayAddress
from agentrl.gateway.control import OpenedEpisode
from agentrl.session import ChatFormat, Session
from tests.gateway.test_chat_completions import USER
from tests.support.asynchrony import asynchronous, until
from tests.support.gateway import LIMITS, episode, served
from tests.support.rollout import HeldEngine
from tests.support.scripted import ScriptedEngine, turns

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [USER]}


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/agentrl/reward"]
)
@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer nonsense", "Bearer agentrl-", "Basic x", "Bearer \xe4", "{wrong}"]
)
@asynchronous
async def test_a_wrong_key_opens_nothing(chat_format: ChatFormat, path: str, key: str) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        if key == "{wrong}":
            key = f"Bearer {client.session.api_key[:-1]}{'a' if client.session.api_key[-1] != 'a' else 'b'}"
        response = await client.http.post(path, json=BODY, headers=[(b"Authorization", key.encode("latin-1"))])
        assert response.status_code == 401
        assert "opens no running episode" in response.text
        assert client.engine.requests == []


@asynchronous
async def test_a_key_dies_with_its_episode(chat_format: ChatFormat) -> None:
    engine = HeldEngine(turns(chat_format, "4"))
    async with episode(chat_format, engine) as client:
        asking = asyncio.ensure_future(client.post(CHAT, BODY))
        await until(lambda: len(engine.held) == 1)
        client.session.close()
        assert (await asking).status_code == 401
        assert (await client.post(CHAT, BODY)).status_code == 401
        assert client.session.graph.turns == []
        await until(lambda: engine.running == 0)


@asynchronous
async def test_each_key_reaches_its_own_episode(chat_format: ChatFormat) -> None:
    engine = ScriptedEngine(turns(chat_format, "4"))
    async with served(Gateway(GatewayAddress(), model="policy")) as gateway, httpx.AsyncClient() as http:
        sessions = [Session(f"e{number}", chat_format, engine, LIMITS, door=gateway) for number in range(3)]
        for session in [*sessions, sessions[1]]:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            response = await http.post(f"{session.base_url}/chat/completions", json=BODY, headers=headers)
            assert response.status_code == 200
        assert [len(session.graph.turns) for session in sessions] == [1, 2, 1]
        for session in sessions:
            session.close()


@asynchronous
async def test_no_key_is_logged(chat_format: ChatFormat, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with episode(chat_format, lambda request: ZeroDivisionError()) as client:  # type: ignore[arg-type]
        secret = client.session.api_key.split("-", 2)[2]
        response = await client.post(CHAT, {**BODY, "temperature": 0})
        assert response.status_code == 500
        assert "ZeroDivisionError" in caplog.text
        assert "temperature, on which the run's config has the last word" in caplog.text
        assert secret not in caplog.text
        assert secret not in response.text


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("Content-Length: 500\r\n\r\n{", ""),
        ("Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", "400"),
        ("Content-Encoding: br\r\nContent-Length: 5\r\n\r\nabcde", "400"),
        ("Transfer-Encoding: chunked\r\n\r\nzz\r\n", "400"),
        ("Content-Length: -5\r\n\r\n", "400"),
        ("X: \x00\r\n\r\n", "400"),
        ("Long: " + "x" * 9000 + "\r\n\r\n", "400"),
    ],
    ids=["body ends", "no gzip", "brotli", "chunks", "length", "header", "long header"],
)
@asynchronous
async def test_requests_that_are_no_http_are_refused_without_a_word_in_the_log(
    chat_format: ChatFormat, caplog: pytest.LogCaptureFixture, rest: str, status: str
) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        url = client.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write((HEAD.format(key=client.session.api_key) + rest).encode())
        if not status:
            await writer.drain()
            writer.close()
        else:
            assert status.encode() in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert (await client.post(CHAT, BODY)).status_code == 200
        assert caplog.text == ""


@asynchronous
async def test_a_request_has_a_largest_size(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4"), max_body=2000) as client:
        assert (await client.post(CHAT, BODY)).status_code == 200
        response = await client.post(CHAT, {**BODY, "user": "x" * 3000})
        assert response.status_code == 413
        assert "too large" in response.json()["error"]["message"]


@asynchronous
async def test_it_listens_on_this_machine_alone_and_only_when_wanted(chat_format: ChatFormat) -> None:
    gateway = Gateway(GatewayAddress(), model="policy")
    async with served(gateway):
        await asyncio.sleep(0.01)
        assert gateway._socket is None
        assert gateway.base_url.startswith("http://127.0.0.1:")
        assert gateway._socket is not None
        assert gateway._socket.getsockname()[0] == "127.0.0.1"


class EmptyDesk:
    async def open(self, wanted: Callable[[], bool]) -> OpenedEpisode:
        raise NotImplementedError


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_it_gives_episodes_to_nobody_else_without_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="AGENTRL_GATEWAY_KEY"):
        Gateway(GatewayAddress(host=host), model="policy").hand_out_episodes(EmptyDesk())
    Gateway(GatewayAddress(host=host, key="secret"), model="policy").hand_out_episodes(EmptyDesk())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    Gateway(GatewayAddress(host=host), model="policy").hand_out_episodes(EmptyDesk())


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (GatewayAddress(public_url="https://proxy.example/agents/"), "https://proxy.example/agents/v1"),
        (GatewayAddress(host="0.0.0.0"), f"http://{socket.gethostname()}:"),
        (GatewayAddress(host="::1"), "http://[::1]:"),
    ],
)
def test_how_agents_reach_it(address: GatewayAddress, url: str) -> None:
    async def base_url() -> str:
        gateway = Gateway(address, model="policy")
        async with served(gateway):
            return gateway.base_url

    assert asyncio.run(base_url()).startswith(url)
