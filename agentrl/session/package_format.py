"""Chat formats of the model families that the package `renderers` knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agentrl.record import Message, ToolCall, ToolSpec
from agentrl.record.messages import with_compact_tools
from agentrl.session.strict import rendered, with_objects
from agentrl.session.turns import ParsedTurn, SampledTurn

log = logging.getLogger(__name__)

_USER: Message = {"role": "user", "content": "x"}
_TOOL: ToolSpec = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ANSWER: Message = {"role": "assistant", "content": "y"}
_RESULT: Message = {"role": "tool", "content": "z", "tool_call_id": "call00000", "name": "probe"}


def _called_with(arguments: Any) -> Message:
    function = {"name": "probe", "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_CALL = _called_with({"a": "b"})
_BROKEN = _called_with("qzbroken")
_CALL_FORMAT = (
    "To call a tool, write:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name of the tool\n"
    "```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
"""How the only families call that do not describe tools, DeepSeek V3 and R1."""
_UNQUOTED = ("qwen3.", "prime-qwen3", "glm-", "minimax-", "hy3", "laguna-", "nemotron-")
"""Families that write arguments as marked text, without JSON's quotes."""


class PackageFormat:
    """A renderer of the package `renderers`; implements `Format`.

    Args:
        config: of the renderer.
        compact_tools: describe tools by `with_compact_tools` instead of the renderer's own way.
    """

    def __init__(self, tokenizer: Any, config: Any, *, compact_tools: bool = False) -> None:
        from renderers import create_renderer

        self._renderer: Any = create_renderer(tokenizer, config)
        # Builds the next prompt where no earlier turn had reasoning: a template that strips reasoning then has nothing
        # to strip, and earlier turns can stay as they are.
        self._keeping: Any = self._renderer
        with suppress(NotImplementedError, ValueError):
            self._keeping = create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
        self._unquoted = config.name.startswith(_UNQUOTED)
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._shows_tools = self._ids([_USER], [_TOOL]) != self._ids([_USER], [])
        self._compact = compact_tools or not self._shows_tools
        self._warned = True
        self._objects = False
        self._missing = self._missing_after_turns()
        # A family that leaves out arguments which are no object would show a call that nobody made.
        self._objects = "qzbroken" not in tokenizer.decode(self.render([_USER, _BROKEN], [_TOOL]))
        self._warned = self._shows_tools

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if tools and self._compact:
            messages, tools = self._described(messages, tools), ()
        if self._objects:
            messages = with_objects(messages)
        return rendered(messages, lambda form: self._ids(form, tools))

    def bridge(self, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        if self._compact:
            tools = ()
        reasoned = any("reasoning_content" in message for message in (*turn.history, turn.message))
        renderer: Any = self._renderer if reasoned else self._keeping
        try:
            bridged = renderer.bridge_to_next_turn(
                list(turn.prompt_ids), list(turn.sampled_ids), list(new_messages), tools=list(tools) or None
            )
        except Exception:  # noqa: BLE001  messages it refuses: rendering them from nothing says what is wrong
            return None
        kept = [*turn.prompt_ids, *turn.sampled_ids]
        if bridged is None or bridged.token_ids[: len(kept)] != kept or self._missing is None:
            return None
        end = len(kept) + (kept[-1] not in self.stop_token_ids)
        return [*bridged.token_ids[:end], *self._missing, *bridged.token_ids[end:]]

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        parsed = self._renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids), tools=list(tools) or None)
        calls: list[ToolCall] = []
        invalid: list[str] = []
        for call in parsed.tool_calls:
            if _complete(call, self._unquoted):
                calls.append(ToolCall(call.name, call.arguments, call.id or ""))
            else:
                invalid.append(call.raw)
        return ParsedTurn(
            parsed.content.strip(), (parsed.reasoning_content or "").strip(), tuple(calls), tuple(invalid)
        )

    def _missing_after_turns(self) -> list[int] | None:
        """What the bridge leaves out after the token that ends a turn, but a full rendering has there.

        Some renderers of the package forget a line break. None: the two differ in another way, do not use the bridge.
        """
        missing: list[int] | None = None
        for turn, new in ((_ANSWER, _USER), (_CALL, _RESULT)):
            prompt, whole = self._ids([_USER], [_TOOL]), self._ids([_USER, turn, new], [_TOOL])
            said = next(i for i, token in enumerate(whole) if i == len(prompt) or token != prompt[i])
            end = next(i for i in range(said, len(whole)) if whole[i] in self.stop_token_ids)
            sampled = whole[said : end + 1]
            bridged = self._keeping.bridge_to_next_turn(prompt, sampled, [new], tools=[_TOOL])
            if bridged is None:
                continue
            tail, expected = bridged.token_ids[len(prompt) + len(sampled) :], whole[end + 1 :]
            left_out = expected[: len(expected) - len(tail)]
            if left_out + tail != expected or missing not in (None, left_out):
                return None
            missing = left_out
        return missing or []

    def _described(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        if not self._warned:
            self._warned = True
            log.warning("this model's chat template shows no tools: they are described in the system message")
        return with_compact_tools(messages, tools, "" if self._shows_tools else _CALL_FORMAT)

    def _ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        forms: Any = list(messages)
        return list(self._renderer.render_ids(forms, tools=list(tools) or None, add_generation_prompt=True))


def _complete(call: Any, unquoted: bool) -> bool:
    """Whether a parsed call can be executed. In a format without quotes, a value that is no JSON is text."""
    accepted = ("ok", "invalid_json") if unquoted else ("ok",)
    return isinstance(call.name, str) and isinstance(call.arguments, dict) and call.status in accepted
