"""Requests that nobody would send: none is a failure of the server, and each is answered in its API's words."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    status_code_conformance,
    unsupported_method,
)

from agentrl.envs.math.arithmetic import CALCULATOR_SPEC
from agentrl.gateway import Gateway, GatewayAddress
from agentrl.gateway.openapi import document
from agentrl.session import ChatFormat, Session
from tests.support.frameworks import ANSWER, LIMITS
from tests.support.scripted import ScriptedEngine, turns

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, unsupported_method)


@dataclass(frozen=True)
class Served:
    """A gateway in a thread of its own, and the key of an episode that never ends."""

    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


@contextmanager
def gateway_in_a_thread(chat_format: ChatFormat) -> Iterator[Served]:
    ready, end = threading.Event(), asyncio.Event()
    found: list[Served] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        gateway = Gateway(GatewayAddress(max_body=2**20), model="policy")
        session = Session("e", chat_format, ScriptedEngine(turns(chat_format, ANSWER)), LIMITS, door=gateway)
        found.append(Served(gateway.url, session.api_key))
        running = asyncio.ensure_future(gateway.run())
        ready.set()
        await end.wait()
        session.close()
        running.cancel()
        await asyncio.wait({running})

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture(scope="module")
def there(chat_format: ChatFormat) -> Iterator[Served]:
    with gateway_in_a_thread(chat_format) as served:
        yield served


OPERATIONS = [(path, method) for path, methods in document()["paths"].items() for method in methods]
BOUNDED = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_the_document_allows_is_answered(path: str, method: str, there: Served) -> None:
    operation = schemathesis.openapi.from_url(f"{there.url}/openapi.json")[path][method]

    @BOUNDED
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        case.call_and_validate(headers=there.headers, checks=CHECKS, timeout=20)

    ask()


USER = {"role": "user", "content": "What is 2 + 2?"}
FUNCTION = CALCULATOR_SPEC["function"]
CALL = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2 + 2"}'}}
SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Solve."}]},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ],
        "tools": [CALCULATOR_SPEC],
        "tool_choice": {"type": "function", "function": {"name": "calculator"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "stop": ["."],
        "n": 2,
        "max_tokens": 20,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Solve.",
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
            {"type": "function_call", "call_id": "c", "name": "calculator", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "tools": [{"type": "function", "name": "calculator", "parameters": FUNCTION["parameters"]}],
        "tool_choice": {"type": "function", "name": "calculator"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 20,
        "stream": True,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Solve."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "calculator", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
        ],
        "tools": [{"name": "calculator", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "tool", "name": "calculator"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["."],
        "stream": True,
    },
    "/agentrl/reward": {"reward": 1.0, "response_id": "chatcmpl-1", "parts": {"a": 1.0}, "info": {"b": [1]}},
    "/agentrl/episodes/end": {"error": "failed", "fate": "env_error"},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
DEEP = "@deep@"
"""Stands for lists within lists, more of them than any parser should follow."""

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(2**63), 1e308, "\0", "\ud800", "\U0010ffff", "", DEEP, "2 " * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """A valid body after a few changes to its values, and perhaps one to its bytes."""
    body = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(0, 3))):
        options = list(places(body))
        if not options:
            break
        *way, last = draw(st.sampled_from(options))
        parent = body
        for key in way:
            parent = parent[key]
        match draw(st.sampled_from(("replace", "delete", "add"))):
            case "replace":
                parent[last] = draw(junk)
            case "delete":
                del parent[last]
            case _ if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = draw(junk)
            case _:
                parent.append(draw(junk))
    text = json.dumps(body).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000).encode()
    cut = draw(st.integers(0, len(text)))
    return draw(
        st.sampled_from(
            [text] * 6 + [text[:cut], text[:cut] + b"\xff\xfe" + text[cut:], text[:cut] + b"\0" + text[cut:]]
        )
    )


def encoded(body: bytes, how: str) -> tuple[bytes, dict[str, str]]:
    match how:
        case "gzip":
            return gzip.compress(body), {"Content-Encoding": "gzip"}
        case "broken gzip":
            return body, {"Content-Encoding": "gzip"}
        case "wrong type":
            return body, {"Content-Type": "text/plain; charset=utf-16"}
        case _:
            return body, {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", BODIES)
def test_a_damaged_request_is_refused_and_no_more(path: str, there: Served) -> None:
    with httpx.Client(base_url=there.url, headers=there.headers, timeout=20) as http:

        @settings(BOUNDED, max_examples=400)
        @given(
            body=mutated(BODIES[path]),
            how=st.sampled_from(["plain"] * 5 + ["gzip", "broken gzip", "wrong type"]),
        )
        def ask(body: bytes, how: str) -> None:
            content, headers = encoded(body, how)
            try:
                response = http.post(path, content=content, headers=headers)
            except httpx.TransportError:
                # aiohttp closes the connection of a body that it can't read, at times before its answer has left.
                assert how == "broken gzip"
                return
            assert response.status_code in (200, 400, 404, 413), response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]

        ask()
        assert http.get("/v1/models").status_code == 200
