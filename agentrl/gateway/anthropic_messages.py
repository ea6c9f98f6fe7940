"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from agentrl.gateway.chat_completions import AtLeastOne
from agentrl.gateway.dialect import (
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
from agentrl.gateway.errors import GatewayError, anthropic_body, unsupported
from agentrl.record import Message
from agentrl.session import ChatAnswer, ChatCall


class Tool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, rename={"value": "schema"}):
    type: Literal["json_schema"]
    value: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class Conversation(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request. Those of type Any are known, and not supported unless they are null."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_tokens: AtLeastOne | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None
    thinking: dict[str, Any] | None = None
    # Without effect on what is sampled.
    cache_control: Any = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # Not supported unless null.
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    prefill: Any = None
    speed: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "prefill", "speed"),
    (None, [], {}),
)
_DECODER = msgspec.json.Decoder(Conversation)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """Implements `Dialect`."""

    id_prefix = "msg_"
    sign_of_life = event({"type": "ping"}, "ping")

    def read(self, body: bytes, known: Known) -> Asked:
        asked = self.read_counted(body, known)
        if asked.call.max_tokens is None:
            raise GatewayError(400, "max_tokens is missing: it is required", param="max_tokens")
        if asked.request.messages[-1].get("role") == "assistant":
            raise unsupported("messages", "the policy can't go on with an answer that the client has begun")
        return asked

    def read_counted(self, body: bytes, known: Known) -> Asked:
        """The same of a request that only counts tokens, and so needs no limit."""
        request = decode(_DECODER, body)
        _check(request)
        tools = request.tools or []
        choice = request.tool_choice or ToolChoice("auto")
        wanted = request.output_config.format if request.output_config is not None else None
        call = ChatCall(
            messages_of(request.system, request.messages),
            [function_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
            tool_choice="required" if choice.type in ("any", "tool") else "none" if choice.type == "none" else "auto",
            tool_name=choice.name if choice.type == "tool" else "",
            one_call=choice.disable_parallel_tool_use is True,
            max_tokens=request.max_tokens,
            stop=request.stop_sequences,
            json_schema=msgspec.json.encode(wanted.value).decode() if wanted is not None else "",
            hides_reasoning=True,
        )
        sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        return Asked(
            call,
            request,
            stream=bool(request.stream),
            not_applied=not_applied(
                known.limits, call, sampling, limit="max_tokens", strict=any(tool.strict for tool in tools)
            ),
        )

    def body(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        (answer,) = answered.answers
        return {
            **_head(answered),
            "content": _blocks(answer),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop or None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.node.token_ids)},
        }

    def events(self, asked: Asked, answered: Answered) -> Iterator[bytes]:
        (answer,) = answered.answers
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        begun = {**_head(answered), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _told("message_start", message=begun)
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _begun(block)
            yield _told("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _told("content_block_delta", index=index, delta=delta)
            yield _told("content_block_stop", index=index)
        ended = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop or None}
        yield _told("message_delta", delta=ended, usage={"output_tokens": len(answer.node.token_ids)})
        yield _told("message_stop")

    def error(self, error: GatewayError) -> dict[str, object]:
        return anthropic_body(error)

    def error_event(self, error: GatewayError) -> bytes:
        return event(anthropic_body(error), "error")


def _check(request: Conversation) -> None:
    refuse_unless_neutral(request, _NEUTRAL, {})
    if request.thinking is not None and request.thinking.get("type") != "disabled":
        raise unsupported("thinking", "how much the policy reasons is its own decision")
    if request.output_config is not None and request.output_config.effort is not None:
        raise unsupported("output_config.effort", "how much the policy reasons is its own decision")
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools[{index}]", f"type {tool.type!r}: only tools of the client can be called")
        if tool.input_examples:
            raise unsupported(f"tools[{index}].input_examples", "put them into the description")


def messages_of(system: str | Sequence[Mapping[str, Any]] | None, given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation as chat messages: results of tools become messages of their own.

    Raises:
        GatewayError: a block that the policy can't be shown.
    """
    if isinstance(system, list):
        system = "\n".join(_string(block.get("text"), 0) for block in system)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(given):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise GatewayError(400, f"messages[{index}].role is {role!r}: use user or assistant", param="messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise GatewayError(
                400, f"messages[{index}].content: use a string or a list of blocks", param=f"messages.{index}.content"
            )
        messages += _assistant(blocks, index) if role == "assistant" else _from_user(role, blocks, index)
    return messages


def _assistant(blocks: list[dict[str, Any]], index: int) -> list[Message]:
    turn: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            turn["content"] += _string(block.get("text"), index)
        elif kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _string(block.get("thinking"), index)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"type": "function", "id": block.get("id"), "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            raise _unknown_block(index, kind)
    return [turn]


def _from_user(role: str, blocks: list[dict[str, Any]], index: int) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(block.get("text"), index))
        elif kind == "tool_result":
            content = block.get("content")
            if isinstance(content, list) and any(_kind(part) != "text" for part in content):
                raise _unknown_block(index, next(_kind(part) for part in content if _kind(part) != "text"))
            if block.get("is_error"):
                content = [
                    {"type": "text", "text": "Error: "},
                    *([content] if isinstance(content, str) else content or ()),
                ]
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            raise _unknown_block(index, kind)
    said: list[Message] = [{"role": role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def _string(value: Any, index: int) -> str:
    if not isinstance(value, str):
        raise GatewayError(400, f"messages[{index}].content holds a block without its text", param="messages")
    return value


def _unknown_block(index: int, kind: Any) -> GatewayError:
    return unsupported(f"messages[{index}].content", f"blocks of type {kind!r} can't be shown to the policy")


def _head(answered: Answered) -> dict[str, Any]:
    return {"id": answered.id, "type": "message", "role": "assistant", "model": answered.model}


def _stop_reason(answer: ChatAnswer) -> str:
    return "stop_sequence" if answer.stop else _STOP_REASONS[answer.reply.finish_reason]


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    reply = answer.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if answer.text or not reply.tool_calls:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in reply.tool_calls]
    return blocks


def _begun(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it stands before anything was said, and what is then said."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments_json(block["input"])}]


def _told(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
