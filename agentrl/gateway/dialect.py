"""What the APIs that clients speak have in common."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from agentrl.gateway.errors import GatewayError, bad_json, unsupported
from agentrl.record import Message, ToolSpec
from agentrl.session import ChatAnswer, ChatCall, SamplingLimits

T = TypeVar("T")
MAX_CHOICES = 128
COMMENT = b": waiting\n\n"
"""A server-sent event that clients pass over."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read.

    Attributes:
        choices: how many turns are sampled for it.
        logprobs: the client wants those of the sampled tokens.
        usage_in_stream: a stream ends with the token counts.
        not_applied: fields that have no effect, by name: sampling is the run's business.
        request: as it came, for what an answer repeats of it.
        history: what the turn answered, for APIs with a memory.
    """

    call: ChatCall
    request: Any
    choices: int = 1
    stream: bool = False
    logprobs: bool = False
    usage_in_stream: bool = True
    not_applied: tuple[str, ...] = ()
    history: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answered:
    """All turns of a request.

    Attributes:
        id: of the answer, under which its turns can be given a reward.
        created: Unix time.
        model: the name under which the policy answers.
        token_texts: of each turn's tokens, where log-probs were asked for.
    """

    id: str
    created: int
    model: str
    answers: Sequence[ChatAnswer]
    token_texts: Sequence[list[str]] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What reading a request needs to know.

    Attributes:
        limits: how the episode samples.
        conversations: by the id of an answer, everything said up to its end.
    """

    limits: SamplingLimits
    conversations: Mapping[str, list[Message]]


class Dialect(Protocol):
    """One of the APIs.

    Attributes:
        id_prefix: of its answers' ids.
        sign_of_life: an event without any meaning.
    """

    id_prefix: str
    sign_of_life: bytes

    def read(self, body: bytes, known: Known) -> Asked:
        """Raises GatewayError for what is malformed or not supported."""
        ...

    def body(self, asked: Asked, answered: Answered) -> dict[str, Any]: ...

    def events(self, asked: Asked, answered: Answered) -> Iterable[bytes]:
        """The same as server-sent events."""
        ...

    def error(self, error: GatewayError) -> dict[str, object]: ...

    def error_event(self, error: GatewayError) -> bytes:
        """A failure within a stream."""
        ...


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises GatewayError where the body is not what the decoder takes."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_json(error) from None


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolSpec:
    """A tool in the one form that the session takes."""
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_json(arguments: Any) -> str:
    """A tool call's arguments as clients want them."""
    return json.dumps(arguments, ensure_ascii=False)


def not_applied(
    limits: SamplingLimits, call: ChatCall, sampling: Mapping[str, Any], *, limit: str, strict: bool
) -> tuple[str, ...]:
    """The names of what a client asked for and does not get, since the run decides on it.

    Args:
        sampling: settings by name, None where they were not sent.
        limit: name of the token limit.
        strict: a tool's calls are to fit its schema, which only forced calls are made to.
    """
    own = {"temperature": limits.temperature, "top_p": limits.top_p, "top_k": limits.top_k}
    names = [name for name, value in sampling.items() if value is not None and own.get(name) != value]
    if call.max_tokens is not None and call.max_tokens > limits.max_response_length:
        names.append(limit)
    if strict and call.tool_choice == "auto":
        names.append("tools.strict")
    return tuple(names)


def refuse_unless_neutral(request: Any, neutral: Mapping[str, tuple[Any, ...]], hints: Mapping[str, str]) -> None:
    """Raises GatewayError for a known field that has another value than these, with its hint if there is one."""
    for name, values in neutral.items():
        if getattr(request, name) not in values:
            raise unsupported(name, hints.get(name, ""))
