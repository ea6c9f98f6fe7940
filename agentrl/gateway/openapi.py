"""The gateway's OpenAPI document, made from the very types that requests are read with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from agentrl.gateway.anthropic_messages import Conversation
from agentrl.gateway.chat_completions import ChatRequest
from agentrl.gateway.control import EndRequest, RewardRequest
from agentrl.gateway.responses import ResponsesRequest

_TURNS = "JSON, or with stream: true server-sent events."
_ENDPOINTS: dict[str, tuple[str, type | None, str]] = {
    "/v1/chat/completions": ("OpenAI Chat Completions.", ChatRequest, _TURNS),
    "/v1/responses": ("OpenAI Responses.", ResponsesRequest, _TURNS),
    "/v1/messages": ("Anthropic Messages.", Conversation, _TURNS),
    "/v1/messages/count_tokens": ("Tokens of a prompt.", Conversation, "The count."),
    "/agentrl/reward": ("What the episode, or one answer of it, is worth.", RewardRequest, "Done."),
    "/agentrl/episodes": ("Opens an episode for an agent that runs elsewhere.", None, "Its key and its task."),
    "/agentrl/episodes/end": ("The episode is over and has no reward.", EndRequest, "Done."),
}
_REFUSALS = {
    "400": "Malformed, or not supported: the message says what to change.",
    "401": "The key opens no running episode.",
    "404": "There is no such thing.",
    "410": "No task is left.",
    "413": "The request is too large.",
    "429": "No episode may be started now: try again after Retry-After seconds.",
    "503": "No engine could answer.",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = [body for _, body, _ in _ENDPOINTS.values() if body is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (summary, body, done) in _ENDPOINTS.items():
        success = "201" if path == "/agentrl/episodes" else "200"
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {
                success: {"description": done},
                **{status: {"description": text} for status, text in _REFUSALS.items()},
            },
        }
        if body is not None:
            content = {"application/json": {"schema": schema_of[body]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[path] = {"post": operation}
    paths["/v1/models"] = {"get": {"summary": "The policy.", "responses": {"200": {"description": "A list."}}}}
    paths["/v1/models"]["get"]["responses"]["401"] = {"description": _REFUSALS["401"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl gateway", "version": "1"},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
