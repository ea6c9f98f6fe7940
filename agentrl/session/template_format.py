"""Chat formats of all other models: a Hugging Face chat template, of which nothing is known but what it renders."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.record import Message, MessageError, ToolCall, ToolSpec
from agentrl.record.messages import with_compact_tools
from agentrl.session import plain_tools
from agentrl.session.strict import rendered, with_objects
from agentrl.session.template_bridge import bridge
from agentrl.session.tool_calls import hermes, syntax_of
from agentrl.session.turns import ParsedTurn, SampledTurn

log = logging.getLogger(__name__)

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks around reasoning; the first pair holds for templates that show none of them."""

_USER: Message = {"role": "user", "content": "qzaske"}
_SYSTEM: Message = {"role": "system", "content": "qzrule"}
_ANSWER: Message = {"role": "assistant", "content": "qzsaid"}
_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "qztool",
        "description": "qztold",
        "parameters": {"type": "object", "properties": {"qzarg": {"type": "string"}}, "required": ["qzarg"]},
    },
}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "call00000", "function": {"name": "qztool", "arguments": {"qzarg": "qzcall"}}}
    ],
}
_BROKEN: Message = {
    **_CALL,
    "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": "qztool", "arguments": "qzbroken"}}],
}
_RESULT: Message = {"role": "tool", "content": "qzdone", "tool_call_id": "call00000", "name": "qztool"}


class TemplateFormat:
    """Implements `Format` for a model's own chat template.

    What the template is able to show is tried out once. If it leaves out tools, calls or their results, tools are used
    as plain text instead (`plain_tools`).

    Args:
        tool_prompt: as in the config: `template`, `compact`, or `auto`, which is the template's own if it has one.
        stop_token_ids: ids that end a turn besides the tokenizer's own and those that the template puts after one.

    Attributes:
        thinking: the marks around reasoning.
        keeps_reasoning_apart: the template reads reasoning from a field of its own.
        call_ends: what the bridge has seen the template write between the last call of a turn and the turn's end.
        closings: those of the stop tokens that the tokenizer cuts out of a text before all else, by their text.
    """

    def __init__(self, tokenizer: Any, *, tool_prompt: str = "auto", stop_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._source = _source(tokenizer)
        marks = [pair for pair in _THINKING if pair[1] in self._source]
        self.thinking = (marks or _THINKING)[0]
        self.keeps_reasoning_apart = "reasoning_content" in self._source
        self._system = self._shows("qzrule", [_SYSTEM, _USER])
        describes = self._shows("qztool", [_USER], [_TOOL])
        uses = all(self._shows(part, [_USER, _CALL, _RESULT], [_TOOL]) for part in ("qzcall", "qzdone"))
        self._plain = not uses or not (describes or tool_prompt == "compact")
        self._compact = tool_prompt == "compact" or self._plain
        self._objects = not self._shows("qzbroken", [_USER, _BROKEN, _RESULT], [_TOOL])
        self._refuses_tools = tool_prompt == "template" and self._plain
        self._warned = False
        self.call_ends: set[str] = set()
        self._syntax = hermes if self._plain else syntax_of(self._source)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*self._closing_ids(), *eos, *stop_token_ids]))
        added = tokenizer.added_tokens_decoder
        self.closings: Mapping[str, int] = {
            added[token].content: token for token in self.stop_token_ids if token in added
        }

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self.encode(self.text(messages, tools))

    def bridge(self, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        return bridge(self, turn, new_messages, tools)

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        start, end = self.thinking
        text = self.decode(ids)
        reasoning = ""
        if text.lstrip().startswith(start) or self.opens_reasoning(prompt_ids):
            reasoning, _, text = text.partition(end)
            reasoning = reasoning.replace(start, "", 1)
        said, found = self._syntax(text, tools)
        for token in self.tokenizer.all_special_tokens:
            said = said.replace(token, "")
        return ParsedTurn(
            said.strip(),
            reasoning.strip(),
            tuple(call for call in found if isinstance(call, ToolCall)),
            tuple(call for call in found if isinstance(call, str)),
        )

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool = True) -> str:
        """What the template makes of a conversation; with `prompt` up to where the next turn begins.

        Raises:
            MessageError: the template refuses it, or would leave a part of it out.
        """
        if not self._source:
            raise MessageError(
                "this model has no chat template: use policy.generate, or a model that was tuned for conversations"
            )
        if messages[0]["role"] == "system" and not self._system:
            raise MessageError(
                "this model's chat template has no place for a system message: say it in the first user message"
            )
        if tools and self._compact:
            messages = self._described(messages, tools)
        if self._plain:
            messages = plain_tools.with_plain_calls(messages)
        elif self._objects:
            messages = with_objects(messages)
        shown = None if self._compact else list(tools) or None
        return rendered(messages, lambda form: self._apply(form, shown, prompt))

    def encode(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within reasoning, which the turn then goes on with."""
        return self.decode(prompt_ids[-16:]).rstrip().endswith(self.thinking[0])

    def _apply(self, messages: list[Message], tools: list[ToolSpec] | None, prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)

    def _described(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        if self._refuses_tools:
            raise MessageError(
                "model.tool_prompt is template, but this model's chat template does not show tools, calls or results: "
                "use auto or compact"
            )
        if self._plain and not self._warned:
            self._warned = True
            log.warning(
                "this model's chat template knows no tools: they are described in the system message, and calls and "
                "results are plain text"
            )
        described = with_compact_tools(messages, tools, plain_tools.CALL_FORMAT if self._plain else "")
        return described if self._system else plain_tools.in_first_user_message(described)

    def _shows(self, part: str, messages: list[Message], tools: list[ToolSpec] | None = None) -> bool:
        try:
            return part in rendered(messages, lambda form: self._apply(form, tools, True))
        except MessageError:
            return False

    def _closing_ids(self) -> Iterator[int]:
        """The special tokens that the template puts at the end of a turn, be it only by opening the next one."""
        plain = self._closing_id(_ANSWER, [_USER])
        if plain is not None:
            yield plain
        if self._plain:
            return
        # A call may end in a special token of its own. So where the usual one does not follow, only what comes with
        # the next message counts.
        for turn in (_ANSWER, _CALL):
            closing = self._closing_id(turn, [_RESULT], usual=plain)
            if closing is not None:
                yield closing

    def _closing_id(self, turn: Message, follow: list[Message], usual: int | None = None) -> int | None:
        try:
            whole, alone = (self.text([_USER, turn, *rest], (), prompt=False) for rest in (follow, []))
        except MessageError:
            return None
        said = "qzcall" if turn is _CALL else turn["content"]
        after = whole.partition(said)[2].partition(follow[0]["content"])[0]
        if turn is _ANSWER and follow[0] is _USER:
            return next(filter(self._is_special, self.encode(after)), None)
        if usual in self.encode(after):
            return usual
        new = whole.removeprefix(alone).partition(follow[0]["content"])[0] if whole.startswith(alone) else ""
        return next(filter(self._is_special, self.encode(new)), None)

    def _is_special(self, token: int) -> bool:
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special


def _source(tokenizer: Any) -> str:
    """The text of a chat template; of several, all."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template
