"""Case 35: a client that asks again for what it already asked for gets one answer, and the history does not fork."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentrl.record import EngineError
from agentrl.session import ChatFormat
from tests.gateway.test_chat_completions import USER
from tests.support import sse
from tests.support.asynchrony import asynchronous, until
from tests.support.gateway import Client, episode
from tests.support.rollout import HeldEngine
from tests.support.scripted import Script, says, turns

BODY = {"model": "m", "messages": [USER]}
CHAT = "/v1/chat/completions"


def numbered(chat_format: ChatFormat) -> Script:
    """Every answer is another number."""
    count = iter(range(1, 100))
    return lambda request: says(chat_format, str(next(count)))


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def gives_up(client: Client, body: dict[str, Any]) -> None:
    """Sends a request on a connection of its own, and closes it while the engine works."""
    before = len(client.engine.requests)
    headers = {"Authorization": client.http.headers["Authorization"]}
    async with httpx.AsyncClient(base_url=client.http.base_url, headers=headers) as impatient:
        asking = asyncio.ensure_future(impatient.post(CHAT, json=body))
        await until(lambda: len(client.engine.requests) > before)
        asking.cancel()
        await asyncio.wait({asking})
    await asyncio.sleep(0.05)  # until the server's side has seen the end of the connection


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_request_whose_client_gave_up_is_answered_once(
    chat_format: ChatFormat, marked: bool, stream: bool
) -> None:
    engine = HeldEngine(numbered(chat_format))
    async with episode(chat_format, engine) as client:
        body = {**BODY, "stream": stream}
        await gives_up(client, body)
        headers = {"x-stainless-retry-count": "1"} if marked else {}
        again = asyncio.ensure_future(client.post(CHAT, body, **headers))
        await asyncio.sleep(0.05)
        engine.let_go()
        response = await again
        said = sse.completion(response.text)[0][0]["message"]["content"] if stream else text(response)
        assert said == "1"
        assert len(engine.requests) == 1
        (branch,) = client.session.graph.branches()
        client.session.close()
        (branch,) = client.session.graph.branches()
        assert branch.trained_tokens == len(says(chat_format, "1").token_ids)


@asynchronous
async def test_an_answer_that_was_ready_too_late_is_kept_for_the_retry(chat_format: ChatFormat) -> None:
    engine = HeldEngine(numbered(chat_format))
    async with episode(chat_format, engine) as client:
        await gives_up(client, BODY)
        engine.let_go()
        engine.before_token = None
        await until(lambda: len(client.session.graph.turns) == 1)
        assert text(await client.post(CHAT, BODY)) == "1"
        assert len(engine.requests) == 1
        assert text(await client.post(CHAT, BODY)) == "2"


@asynchronous
async def test_a_retry_of_an_answer_that_was_sent_gets_that_answer(chat_format: ChatFormat) -> None:
    """It was sent, but the client never saw it: only its own counter says so."""
    async with episode(chat_format, numbered(chat_format)) as client:
        first = await client.post(CHAT, BODY)
        again = await client.post(CHAT, BODY, **{"x-stainless-retry-count": "1"})
        assert (text(first), text(again)) == ("1", "1")
        assert first.json()["id"] == again.json()["id"]


@asynchronous
async def test_an_idempotency_key_tells_requests_apart(chat_format: ChatFormat) -> None:
    async with episode(chat_format, numbered(chat_format)) as client:
        keys = ["a", "b", "a"]
        said = [text(await client.post(CHAT, BODY, **{"Idempotency-Key": key})) for key in keys]
        assert said == ["1", "2", "1"]


@asynchronous
async def test_equal_requests_of_clients_that_wait_are_samples_of_their_own(chat_format: ChatFormat) -> None:
    """Two sub-agents may well begin with the same words."""
    engine = HeldEngine(numbered(chat_format))
    async with episode(chat_format, engine) as client:
        asking = [asyncio.ensure_future(client.post(CHAT, BODY)) for _ in range(2)]
        await until(lambda: len(engine.held) == 2)
        engine.let_go()
        assert sorted([text(await response) for response in asking]) == ["1", "2"]
        assert len(client.session.graph.branches()) == 2


@asynchronous
async def test_a_request_that_failed_is_asked_anew(chat_format: ChatFormat) -> None:
    engine = HeldEngine(numbered(chat_format))
    engine.before_token = None
    async with episode(chat_format, engine) as client:
        engine.lose()
        response = await client.post(CHAT, BODY)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
        engine.failures.clear()
        assert text(await client.post(CHAT, BODY, **{"x-stainless-retry-count": "1"})) == "1"


@asynchronous
async def test_an_answer_nobody_came_back_for_is_not_trained(chat_format: ChatFormat) -> None:
    engine = HeldEngine(numbered(chat_format))
    async with episode(chat_format, engine) as client:
        await gives_up(client, BODY)
        engine.let_go()
        await until(lambda: len(client.session.graph.turns) == 1)
        other = {"model": "m", "messages": [{"role": "user", "content": "Something else."}]}
        asking = asyncio.ensure_future(client.post(CHAT, other))
        await until(lambda: len(engine.requests) == 2)
        engine.let_go()
        assert text(await asking) == "2"
        client.session.close()
        lost, taken = client.session.graph.branches()
        assert (lost.trained_tokens, len(lost.turns)) == (0, 1)
        assert taken.trained_tokens > 0


@asynchronous
async def test_many_answers_are_forgotten_one_by_one(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, "4")) as client:
        for number in range(150):
            body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
            assert text(await client.post(CHAT, body)) == "4"
        assert len(client.session.graph.turns) == 150


@asynchronous
async def test_samples_of_a_request_that_failed_are_not_trained(chat_format: ChatFormat) -> None:
    count = iter(range(100))

    async def script(request: Any) -> Any:
        if next(count) % 3 < 2:
            return says(chat_format, "ok")
        await asyncio.sleep(0.05)
        return EngineError("gone")

    async with episode(chat_format, script) as client:
        for _ in range(2):
            assert (await client.post(CHAT, {**BODY, "n": 3})).status_code == 503
        client.session.close()
        branches = client.session.graph.branches()
        assert [(len(branch.turns), branch.trained_tokens) for branch in branches] == [(1, 0)] * 4


@asynchronous
async def test_a_retry_joins_the_request_that_waits_for_longest(chat_format: ChatFormat) -> None:
    engine = HeldEngine(numbered(chat_format))
    async with episode(chat_format, engine) as client:
        asking = [asyncio.ensure_future(client.post(CHAT, BODY))]
        await until(lambda: len(engine.held) == 1)
        asking.append(asyncio.ensure_future(client.post(CHAT, BODY)))
        await until(lambda: len(engine.held) == 2)
        asking.append(asyncio.ensure_future(client.post(CHAT, BODY, **{"x-stainless-retry-count": "1"})))
        await asyncio.sleep(0.05)
        engine.let_go()
        assert [text(await response) for response in asking] == ["1", "2", "1"]
