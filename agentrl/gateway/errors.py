"""What a client is told when a request can't be answered, in words that its SDK knows how to raise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.record import (
    AgentRLError,
    ContextOverflow,
    EngineError,
    EpisodeClosed,
    GuideError,
    MessageError,
    PeerLost,
)

_PLACE = re.compile(r" - at `\$\.?(.*)`$")


class GatewayError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        code: short name of the reason, as OpenAI's API has it.
        param: the field of the request that is wrong.
        headers: to be sent along.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def unsupported(param: str, why: str = "") -> GatewayError:
    """A field, or a value of it, that this server can't honour: better said than ignored."""
    return GatewayError(
        400, f"{param} is not supported here{f': {why}' if why else ': leave it out'}", code="unsupported", param=param
    )


def bad_json(error: Exception) -> GatewayError:
    """A body that is no JSON, or not of the form that the endpoint takes."""
    text = str(error)
    place = _PLACE.search(text)
    unknown = re.search(r"unknown field `(.*?)`", text)
    inside = place[1] if place else ""
    param = ".".join(part for part in (inside, unknown[1] if unknown else "") if part)
    if unknown:
        return GatewayError(400, f"{param} is not supported here: leave it out", code="unknown_parameter", param=param)
    said = text[: place.start()] if place else text
    return GatewayError(400, f"{param}: {said}" if param else said, code="invalid_value", param=param)


def refusal(error: BaseException) -> GatewayError:
    """What a failure of the conversation layer or the engine means to a client; of one that nobody foresaw, no more
    than that it happened."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, ContextOverflow):
        return GatewayError(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, GuideError):
        return GatewayError(400, str(error), code="invalid_json_schema", param="response_format")
    if isinstance(error, MessageError):
        return GatewayError(400, str(error), code="invalid_value", param=error.field)
    if isinstance(error, RecursionError):
        return GatewayError(400, "the request is nested too deeply", code="invalid_value")
    if isinstance(error, EpisodeClosed):
        return ended()
    if isinstance(error, EngineError | PeerLost):
        return GatewayError(503, f"no engine could answer: {error}", code="engine_error")
    if isinstance(error, AgentRLError | ValueError):
        return GatewayError(400, str(error), code="invalid_value")
    return GatewayError(500, "the gateway failed at this request; its log says how", code="internal_error")


def ended() -> GatewayError:
    """The key belongs to no episode that is running."""
    return GatewayError(
        401, "this key opens no running episode: it is wrong, or its episode has ended", code="no_episode"
    )


def openai_body(error: GatewayError) -> dict[str, object]:
    """The error as OpenAI's SDKs read it."""
    kind = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param or None, "code": error.code or None}}


def anthropic_body(error: GatewayError) -> dict[str, object]:
    """The error as Anthropic's SDK reads it."""
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which its clients know
    return {"type": "error", "error": {"type": kind, "message": message}}
