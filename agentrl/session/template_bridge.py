"""The next prompt on top of a sampled turn, for a chat template of which nothing is known but what it renders.

The new prompt is `prompt + sampled + tail`, where the tail is what the template puts between the end of the turn and
the start of the next one. It is used only where the template itself proves it right:

* the conversation so far is, letter by letter, the beginning of the conversation with the turn and the new messages:
  the template does not rewrite what the model has already seen;
* the same holds with marks in place of all that the turn says, every mark is there once (so nothing of the turn is
  left out), and what comes after the last one is also how the conversation with the real turn ends: the tail does not
  depend on what was said;
* the tail begins with a special token. Tokenizers cut the text there before anything else, so that its tokens do not
  depend on the text before it. That token ends the turn: if the model sampled it, it is not repeated, and if it sampled
  another one, the template would not have it there.

In all other cases the answer is None, the conversation is rendered from nothing, and the message graph forks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.record import Message, MessageError, ToolSpec
from agentrl.session.turns import SampledTurn


class Template(Protocol):
    """What the proof needs of a chat template (`TemplateFormat`)."""

    stop_token_ids: tuple[int, ...]
    closings: Mapping[str, int]
    call_ends: set[str]
    thinking: tuple[str, str]
    keeps_reasoning_apart: bool

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool = True) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool: ...


def bridge(
    template: Template, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int] | None:
    """The prompt after `new_messages` on top of exactly the tokens of `turn`, or None where that is not proven."""
    try:
        tail = _tail(template, turn, new_messages, tools)
    except MessageError:
        return None
    if tail is None:
        return None
    kept = [*turn.prompt_ids, *turn.sampled_ids]
    last = turn.sampled_ids[-1]
    if last == tail[0]:
        return [*kept, *tail[1:]]
    # Another stop token would not be there in the template's rendering. Without any, a limit or a stop text ended the
    # turn, and the end mark is added; the end of a thought would have to be added before that.
    cut = last not in template.stop_token_ids and not _ends_in_reasoning(template, turn)
    return [*kept, *tail] if cut else None


def _tail(
    template: Template, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int] | None:
    """The tokens from the one that ends the turn up to the start of the next turn."""
    marked, marks = _marked(turn.message, template)
    before = template.text(turn.history, tools)
    after = template.text([*turn.history, turn.message, *new_messages], tools)
    like_after = template.text([*turn.history, marked, *new_messages], tools)
    if not after.startswith(before) or not like_after.startswith(before):
        return None
    body, real = like_after[len(before) :], after[len(before) :]
    if any(body.count(mark) != 1 for mark in marks) or turn.message["content"] not in real:
        return None
    rest = _after_last(marks, body)
    end = min((place for place in map(rest.find, template.closings) if place >= 0), default=-1)
    if end < 0 or not real.endswith(rest[end:]):
        return None
    if rest[:end].strip() and rest[:end] not in template.call_ends:
        # The marks of a call, or else the end found is not that of the turn but of the message after it.
        other = [{**new_messages[0], "content": "qznextqz"}, *new_messages[1:]]
        unlike = _after_last(marks, template.text([*turn.history, marked, *other], tools)[len(before) :])
        if "tool_calls" not in turn.message or "qznextqz" in unlike[:end] or unlike[:end] != rest[:end]:
            return None
        template.call_ends.add(rest[:end])
    ids = template.encode(rest[end:])
    return ids if template.encode(body)[-len(ids) :] == ids and ids[0] in template.closings.values() else None


def _after_last(marks: Sequence[str], text: str) -> str:
    return text[max(text.find(mark) + len(mark) for mark in marks) :]


def _ends_in_reasoning(template: Template, turn: SampledTurn) -> bool:
    reasons = "reasoning_content" in turn.message or template.opens_reasoning(turn.prompt_ids)
    return reasons and template.thinking[1] not in template.decode(turn.sampled_ids)


def _marked(message: Message, template: Template) -> tuple[Message, list[str]]:
    """The turn with marks in place of all that it says, and these marks."""
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"qzmark{len(marks)}qz")
        return marks[-1]

    marked: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = message.get("tool_calls", ())
    if "reasoning_content" in message:
        reasoning = mark()
        if template.keeps_reasoning_apart:
            marked["reasoning_content"] = reasoning
        else:
            # A template that does not know of reasoning keeps it or not depending on what it does with the text.
            start, end = template.thinking
            marked["content"] = f"{start}\n{reasoning}\n{end}\n\n"
    if message["content"] or not calls:
        marked["content"] += mark()
    if calls:
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"text": mark()}}} for call in calls
        ]
    return marked, marks
