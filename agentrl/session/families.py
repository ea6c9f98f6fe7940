"""Which of the renderers of the package `renderers` a model has."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Explains a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}, "count": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "What is a rill?"}
_ANSWER = {"role": "assistant", "content": "A small stream."}
_THOUGHT = {**_ANSWER, "reasoning_content": "I know that."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00000",
            "function": {
                "name": "look_up",
                "arguments": {"word": "rill", "count": 2, "deep": True, "more": {"tags": ["a"]}},
            },
        }
    ],
}
_RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "a small stream"}

_PROBES: tuple[tuple[list[Any], list[Any] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_USER, _ANSWER, _USER], None),
    ([_SYSTEM, _USER, _THOUGHT, _USER], None),
    ([_USER], [_TOOL]),
    ([_SYSTEM, _USER, _CALL, _RESULT], [_TOOL]),
    ([_USER, {**_CALL, "reasoning_content": "I look it up."}, _RESULT, _THOUGHT, _USER], [_TOOL]),
    ([_USER, {**_CALL, "content": "I look it up."}, _RESULT, _RESULT], None),
)
"""Conversations on which two templates that are not the same differ. Some templates refuse some of them."""


def renderer_config(tokenizer: Any, name: str) -> Any | None:
    """The configuration of the renderer for a model; None if there is none and its chat template has to do.

    `auto` goes by the model's name on the hub, and for all others (a local folder, a fine-tune) by what the template
    does: the renderer that gives the very tokens that the model's own template gives.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name

    if name == "auto":
        known = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
        return config_from_name(known) if known else _same_as_template(tokenizer)
    return None if name == "default" else config_from_name(name)


def _same_as_template(tokenizer: Any) -> Any | None:
    from renderers.base import RENDERER_REGISTRY, create_renderer
    from renderers.configs import DefaultRendererConfig, config_from_name

    if not getattr(tokenizer, "chat_template", None):
        return None
    create_renderer(tokenizer, DefaultRendererConfig())  # Fills the registry.
    for name in RENDERER_REGISTRY:
        config = config_from_name(name)
        if name != "default" and config is not None and _agrees(tokenizer, config):
            log.info("the model's chat template is that of the renderer %s", name)
            return config
    return None


def _agrees(tokenizer: Any, config: Any) -> bool:
    from renderers.base import create_renderer

    if config.name == "gpt-oss" and "<|channel|>" not in tokenizer.get_vocab():
        return False  # Its renderer would look for a vocabulary on the network first.
    try:
        renderer = create_renderer(tokenizer, config)
    except Exception:  # noqa: BLE001  mostly an AssertionError: the vocabulary lacks that family's tokens
        return False
    # A renderer has a fixed date where a template has today's.
    dates = {name: getattr(config, name) for name in config.template_field_names() if "date" in name}

    def by_template(messages: list[Any], tools: list[Any] | None) -> list[int]:
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **dates
        )
        return list(ids)

    def by_renderer(messages: list[Any], tools: list[Any] | None) -> list[int]:
        return renderer.render_ids(messages, tools=tools, add_generation_prompt=True)

    answers = [(_outcome(by_template, *probe), _outcome(by_renderer, *probe)) for probe in _PROBES]
    return answers[0][0] is not None and all(one == other for one, other in answers)


def _outcome(render: Any, messages: list[Any], tools: list[Any] | None) -> list[int] | None:
    try:
        return render(messages, tools)
    except Exception:  # noqa: BLE001  refusing a conversation is an answer too
        return None
