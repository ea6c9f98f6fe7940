"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from agentrl.gateway.dialect import (
    COMMENT,
    MAX_CHOICES,
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
from agentrl.gateway.errors import GatewayError, openai_body
from agentrl.session import ChatAnswer, ChatCall

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
DONE = b"data: [DONE]\n\n"


class Function(msgspec.Struct):
    """What a tool is; whether it is `strict` has no effect: calls are not guided unless they are forced."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(msgspec.Struct, rename={"value": "schema"}):
    name: str
    value: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request. Those of type Any are known, and not supported unless they are neutral."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    # Without effect on what is sampled.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Not supported unless neutral.
    audio: Any = None
    frequency_penalty: float | None = None
    function_call: Any = None
    functions: Any = None
    logit_bias: dict[str, Any] | None = None
    modalities: list[str] | None = None
    moderation: Any = None
    prediction: Any = None
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None,),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "frequency_penalty": "tokens are trained under the distribution of the policy itself",
    "presence_penalty": "tokens are trained under the distribution of the policy itself",
    "logit_bias": "tokens are trained under the distribution of the policy itself",
    "top_logprobs": "only the log-probs of the sampled tokens are known (logprobs: true)",
    "reasoning_effort": "how much the policy reasons is its own decision",
}
_DECODER = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    """Implements `Dialect`."""

    id_prefix = "chatcmpl-"
    sign_of_life = COMMENT

    def read(self, body: bytes, known: Known) -> Asked:
        request = decode(_DECODER, body)
        refuse_unless_neutral(request, _NEUTRAL, _HINTS)
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        choice = request.tool_choice
        tools = request.tools or []
        call = ChatCall(
            request.messages,
            [function_tool(t.function.name, t.function.description, t.function.parameters) for t in tools],
            tool_choice="required" if isinstance(choice, NamedTool) else choice or "auto",
            tool_name=choice.function.name if isinstance(choice, NamedTool) else "",
            one_call=request.parallel_tool_calls is False,
            max_tokens=limit,
            stop=[request.stop] if isinstance(request.stop, str) else request.stop,
            json_schema=schema_text(request.response_format),
            hides_reasoning=True,
        )
        return Asked(
            call,
            request,
            choices=request.n or 1,
            stream=bool(request.stream),
            logprobs=bool(request.logprobs),
            usage_in_stream=bool(request.stream_options and request.stream_options.include_usage),
            not_applied=not_applied(
                known.limits,
                call,
                {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed},
                limit=limit_name,
                strict=any(tool.function.strict for tool in tools),
            ),
        )

    def body(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answered.answers):
            choice = {"index": index, "message": _message(answer), "finish_reason": answer.reply.finish_reason}
            choice["logprobs"] = _logprobs(answered, index) if asked.logprobs else None
            choices.append(choice)
        head = _head(answered, "chat.completion")
        return {**head, "choices": choices, "usage": _usage(answered)}

    def events(self, asked: Asked, answered: Answered) -> Iterator[bytes]:
        head = _head(answered, "chat.completion.chunk")
        usage = {"usage": None} if asked.usage_in_stream else {}

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
            return event({**head, "choices": [choice], **usage})

        for index, answer in enumerate(answered.answers):
            message = _message(answer)
            calls = message.pop("tool_calls", [])
            yield chunk(index, {"role": message.pop("role"), "content": ""})
            deltas = [{key: value for key, value in message.items() if value}]
            deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(calls)]
            logprobs = _logprobs(answered, index) if asked.logprobs else None
            for delta in filter(None, deltas):
                yield chunk(index, delta, logprobs=logprobs)
                logprobs = None
            yield chunk(index, {}, answer.reply.finish_reason, logprobs)
        if asked.usage_in_stream:
            yield event({**head, "choices": [], "usage": _usage(answered)})
        yield DONE

    def error(self, error: GatewayError) -> dict[str, object]:
        return openai_body(error)

    def error_event(self, error: GatewayError) -> bytes:
        return event(openai_body(error))


def schema_text(wanted: ResponseFormat | None) -> str:
    """The JSON schema that an answer has to fit; empty for plain text."""
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return '{"type": "object"}'
    if wanted.json_schema is None:
        raise GatewayError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    return msgspec.json.encode(wanted.json_schema.value).decode()


def _head(answered: Answered, kind: str) -> dict[str, Any]:
    return {"id": answered.id, "object": kind, "created": answered.created, "model": answered.model}


def _message(answer: ChatAnswer) -> dict[str, Any]:
    reply = answer.reply
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_json(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    return message


def _logprobs(answered: Answered, index: int) -> dict[str, Any]:
    return {"content": token_logprobs(answered, index), "refusal": None}


def token_logprobs(answered: Answered, index: int) -> list[dict[str, Any]]:
    """The log-prob of each sampled token; the bytes of one that is no whole character are not known."""
    node = answered.answers[index].node
    assert node.logprobs is not None
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(answered.token_texts[index], node.logprobs.tolist(), strict=True)
    ]


def _usage(answered: Answered) -> dict[str, Any]:
    prompt = max(answer.prompt_tokens for answer in answered.answers)
    sampled = sum(len(answer.node.token_ids) for answer in answered.answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
