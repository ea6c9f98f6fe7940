"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from agentrl.gateway.chat_completions import AtLeastOne, JsonSchema, ResponseFormat, schema_text, token_logprobs
from agentrl.gateway.dialect import (
    COMMENT,
    Answered,
    Asked,
    Known,
    arguments_json,
    decode,
    event,
    function_tool,
    not_applied,
    refuse_unless_neutral,
)
from agentrl.gateway.errors import GatewayError, openai_body, unsupported
from agentrl.record import Message
from agentrl.session import ChatCall


class Tool(msgspec.Struct):
    """What a tool is; whether it is `strict` has no effect: calls are not guided unless they are forced."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct):
    type: str
    name: str = ""


class TextFormat(msgspec.Struct, rename={"value": "schema"}, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    value: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request. Those of type Any are known, and not supported unless they are neutral."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Without effect on what is sampled. An answer is kept as long as its episode, stored or not.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Not supported unless neutral.
    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: str | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_DECODER = msgspec.json.Decoder(ResponsesRequest)


class Responses:
    """Implements `Dialect`."""

    id_prefix = "resp_"
    sign_of_life = COMMENT

    def read(self, body: bytes, known: Known) -> Asked:
        request = decode(_DECODER, body)
        refuse_unless_neutral(request, _NEUTRAL, {})
        _check_options(request)
        tools = request.tools or []
        for index, tool in enumerate(tools):
            if tool.type != "function" or not tool.name:
                raise unsupported(f"tools[{index}]", f"type {tool.type!r}: only functions with a name can be called")
        choice = request.tool_choice
        if isinstance(choice, NamedTool) and choice.type != "function":
            raise unsupported("tool_choice", f"type {choice.type!r}: use auto, none, required or a function")
        history = _earlier(request, known.conversations) + messages_of(request.input)
        instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
        call = ChatCall(
            [*instructions, *history],
            [function_tool(tool.name, tool.description, tool.parameters) for tool in tools],
            tool_choice="required" if isinstance(choice, NamedTool) else choice or "auto",
            tool_name=choice.name if isinstance(choice, NamedTool) else "",
            one_call=request.parallel_tool_calls is False,
            max_tokens=request.max_output_tokens,
            json_schema=_schema(request),
            hides_reasoning=True,
        )
        return Asked(
            call,
            request,
            stream=bool(request.stream),
            logprobs=_LOGPROBS in (request.include or ()),
            not_applied=not_applied(
                known.limits,
                call,
                {"temperature": request.temperature, "top_p": request.top_p},
                limit="max_output_tokens",
                strict=any(tool.strict for tool in tools),
            ),
            history=history,
        )

    def body(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        return self._response(asked, answered, _items(asked, answered))

    def events(self, asked: Asked, answered: Answered) -> Iterator[bytes]:
        items = _items(asked, answered)
        number = 0

        def told(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

        begun = {**self._response(asked, answered, []), "status": "in_progress", "usage": None}
        begun["incomplete_details"] = None
        yield told("response.created", response=begun)
        yield told("response.in_progress", response=begun)
        for index, item in enumerate(items):
            place: dict[str, Any] = {"output_index": index}
            yield told("response.output_item.added", item=_empty(item), **place)
            place["item_id"] = item["id"]
            if item["type"] == "function_call":
                yield told("response.function_call_arguments.delta", delta=item["arguments"], **place)
                yield told(
                    "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **place
                )
            else:
                part = item["content"][0]
                yield from _part_events(told, part, {**place, "content_index": 0})
            yield told("response.output_item.done", item=item, output_index=index)
        response = self._response(asked, answered, items)
        yield told(f"response.{response['status']}", response=response)

    def error(self, error: GatewayError) -> dict[str, object]:
        return openai_body(error)

    def error_event(self, error: GatewayError) -> bytes:
        fields = {"type": "error", "code": error.code or None, "message": error.message, "param": error.param or None}
        return event({**fields, "sequence_number": 0, **openai_body(error)}, "error")

    def _response(self, asked: Asked, answered: Answered, items: list[dict[str, Any]]) -> dict[str, Any]:
        request: ResponsesRequest = asked.request
        (answer,) = answered.answers
        cut = answer.reply.finish_reason == "length"
        sampled = len(answer.node.token_ids)
        return {
            "id": answered.id,
            "object": "response",
            "created_at": answered.created,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": answered.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store is not False,
            "temperature": answer.node.temperature,
            "text": {"format": msgspec.to_builtins(_format(request) or TextFormat("text"))},
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": [msgspec.to_builtins(tool) for tool in request.tools or ()],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + sampled,
            },
        }


def _check_options(request: ResponsesRequest) -> None:
    if any(value is not None for value in (request.reasoning or {}).values()):
        raise unsupported("reasoning", "how much the policy reasons is its own decision")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity")
    for name in request.include or ():
        if name not in _INCLUDES:
            raise unsupported("include", f"{name!r} is not known")


def _format(request: ResponsesRequest) -> TextFormat | None:
    return request.text.format if request.text is not None else None


def _schema(request: ResponsesRequest) -> str:
    wanted = _format(request)
    if wanted is None:
        return ""
    if wanted.type == "json_schema" and wanted.value is None:
        raise GatewayError(400, "text.format.schema is missing", param="text.format.schema")
    schema = None if wanted.value is None else JsonSchema(wanted.name, wanted.value)
    return schema_text(ResponseFormat(wanted.type, schema))


def _earlier(request: ResponsesRequest, conversations: Mapping[str, list[Message]]) -> list[Message]:
    before = request.previous_response_id
    if before is None:
        return []
    if before not in conversations:
        raise GatewayError(
            400,
            f"previous_response_id: this episode has no response {before!r}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return conversations[before]


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Input items as chat messages: what the model said at once (reasoning, text, calls) is one of them.

    Raises:
        GatewayError: an item that the policy can't be shown.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    open_turn = False
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            open_turn = False
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(answer)
            open_turn = False
        elif kind in ("message", "function_call", "reasoning"):
            turn = messages[-1] if open_turn else {"role": "assistant", "content": ""}
            begins = kind == "reasoning" and open_turn
            second = kind == "message" and bool(turn["content"] or turn.get("tool_calls"))
            if not open_turn or begins or second:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            open_turn = True
            _add(turn, kind, item)
        else:
            raise unsupported(f"input[{index}]", f"items of type {kind!r} can't be shown to the policy")
    return messages


def _add(turn: Message, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        turn["content"] = item.get("content")
    elif kind == "reasoning":
        parts = [part for name in ("content", "summary") for part in _parts(item, name)]
        turn["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append(
            {"type": "function", "id": item.get("call_id") or item.get("id"), "function": function}
        )


def _parts(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    given = item.get(name) or []
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise GatewayError(400, f"{name} of a reasoning item is {given!r}: use a list of parts", param="input")
    return given


def _items(asked: Asked, answered: Answered) -> list[dict[str, Any]]:
    """The output: reasoning, text and calls, each an item with an id of its own."""
    (answer,) = answered.answers
    reply = answer.reply
    base = answered.id.removeprefix(Responses.id_prefix)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        part: dict[str, Any] = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{base}", "summary": [], "content": [part], "status": status})
    if answer.text or not reply.tool_calls:
        logprobs = token_logprobs(answered, 0) if asked.logprobs else []
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{base}", "role": "assistant", "status": status, "content": [part]})
    for number, call in enumerate(reply.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{base}_{number}",
                "call_id": call.id,
                "name": call.name,
                "arguments": arguments_json(call.arguments),
                "status": "completed",
            }
        )
    return items


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it stands before anything was said."""
    bare = {**item, "status": "in_progress"}
    return {**bare, "arguments": ""} if item["type"] == "function_call" else {**bare, "content": []}


def _part_events(told: Any, part: dict[str, Any], place: dict[str, Any]) -> Iterator[bytes]:
    kind = part["type"]
    logprobs = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield told("response.content_part.added", part=empty, **place)
    yield told(f"response.{kind}.delta", delta=part["text"], **logprobs, **place)
    yield told(f"response.{kind}.done", text=part["text"], **logprobs, **place)
    yield told("response.content_part.done", part=part, **place)
