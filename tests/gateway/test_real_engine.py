"""The gateway on the torch engine and the bundled model: what is asked for by a schema is what comes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch

from agentrl.engine.torch_engine import load_torch_engine
from agentrl.session import ChatFormat, SamplingLimits
from agentrl.tiny import tiny_model_path
from tests.gateway.test_chat_completions import OTHER_TOOL, TOOL, USER
from tests.support.asynchrony import asynchronous
from tests.support.gateway import Client, episode

LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=512, max_response_length=200, max_model_len=1024)
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 1, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def engine() -> Any:
    return load_torch_engine(
        str(tiny_model_path()),
        dtype="float32",
        device=torch.device("cpu"),
        max_batch_size=8,
        max_model_len=1024,
        kv_cache_tokens=None,
        kv_on_update="recompute",
    )


async def choices(client: Client, **fields: Any) -> list[dict[str, Any]]:
    return (await client.chat(USER, n=6, **fields))["choices"]


@asynchronous
async def test_answers_fit_their_schema_and_are_not_trained(chat_format: ChatFormat) -> None:
    running = engine()
    async with episode(chat_format, running, LIMITS) as client:
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        for choice in await choices(client, response_format=wanted):
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        assert sum(branch.trained_tokens for branch in client.session.graph.branches()) == 0
    await running.close()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
@asynchronous
async def test_forced_calls_are_calls(chat_format: ChatFormat, choice: Any) -> None:
    running = engine()
    search = {**OTHER_TOOL, "function": {"name": "search", "parameters": PERSON}}
    async with episode(chat_format, running, LIMITS) as client:
        for made in await choices(client, tools=[TOOL, search], tool_choice=choice):
            if made["finish_reason"] == "length":
                continue  # the free text of an expression may go on and on
            (call,) = made["message"]["tool_calls"]
            schema = {"calculator": TOOL, "search": search}[call["function"]["name"]]["function"]["parameters"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            assert choice == "required" or call["function"]["name"] == "search"
    await running.close()


@asynchronous
async def test_a_schema_nobody_can_follow_is_the_clients_mistake(chat_format: ChatFormat) -> None:
    running = engine()
    async with episode(chat_format, running, LIMITS) as client:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        response = await client.post(
            "/v1/chat/completions", {"model": "m", "messages": [USER], "response_format": wanted}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json_schema")
    await running.close()
