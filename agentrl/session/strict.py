"""Histories in the form that even strict chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from agentrl.record import Message, MessageError

T = TypeVar("T")


def rendered(messages: Sequence[Message], render: Callable[[list[Message]], T]) -> T:
    """What `render` makes of a history: as it is, or in a strict form if the model's template refuses it so.

    Raises:
        MessageError: it refuses all forms.
    """
    refusal: Exception | None = None
    for form in _forms(messages):
        try:
            return render(form)
        except Exception as error:  # noqa: BLE001  a template is the model's own program: whatever it raises, it means no
            refusal = refusal or error
    assert refusal is not None
    if isinstance(refusal, MessageError):
        raise refusal
    raise MessageError(f"this model's chat template refuses the messages: {_words(refusal)}") from refusal


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    yield list(messages)
    form = strict(messages)
    yield form
    if any("tool_calls" in message for message in form):
        yield _with_texts(
            form
        )  # Some templates write arguments down as they come, as the JSON text that a client sent.


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """The same history with tool-call arguments that are no JSON object as one that holds them as text."""
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        result.append(message)
    return result


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments = given if isinstance(given, dict) else {"arguments": given}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_texts(messages: Sequence[Message]) -> list[Message]:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def strict(messages: Sequence[Message]) -> list[Message]:
    """The same history, for templates that take nothing but well-formed tool use.

    Tool-call arguments that are no JSON object become one that holds them as text. Ids become nine letters and digits,
    and each answer gets the id and name of the call it answers. An answer to no call (the refusal of a malformed one,
    say) joins the answer before it, or is what the user says.
    """
    result: list[Message] = []
    waiting: list[tuple[str, str, str]] = []
    count = 0
    for message in with_objects(messages):
        if message["role"] == "tool":
            _answer(message, result, waiting)
        elif calls := message.get("tool_calls"):
            ids = [call_id(count + index) for index in range(len(calls))]
            count += len(calls)
            waiting = [(call["id"], new, call["function"]["name"]) for call, new in zip(calls, ids, strict=True)]
            calls = [{**call, "id": new} for call, new in zip(calls, ids, strict=True)]
            result.append({**message, "tool_calls": calls})
        else:
            result.append(message)
    return result


def call_id(number: int) -> str:
    """An id for the tool call with this number, in the one form that every template takes."""
    return f"call{number % 100_000:05d}"


def _answer(message: Message, result: list[Message], waiting: list[tuple[str, str, str]]) -> None:
    given = message.get("tool_call_id")
    answered = next((call for call in waiting if not given or call[0] == given), None)
    if answered is not None:
        waiting.remove(answered)
        _, strict_id, name = answered
        result.append({"name": name, **message, "tool_call_id": strict_id})
    elif result and result[-1]["role"] in ("tool", "user"):
        before = result[-1]
        result[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
    else:
        result.append({"role": "user", "content": message["content"]})


def _words(error: Exception) -> str:
    text = str(error)
    known: Any = type(error).__module__.partition(".")[0] in ("jinja2", "renderers") or isinstance(error, ValueError)
    return text if known and text else f"{type(error).__name__}: {text}"
