"""The renderers of the package `renderers`: found by what a model's template does, and exact with every one of them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import AutoRendererConfig, create_renderer
from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY
from renderers.configs import config_from_name

from agentrl.config.schema import ModelConfig
from agentrl.record import Message, MessageError
from agentrl.record.messages import normalise_messages
from agentrl.session import ChatFormat, SampledTurn, SamplingLimits, Session
from agentrl.session.families import renderer_config
from agentrl.tiny import tiny_model_path
from tests.support.asynchrony import asynchronous
from tests.support.scripted import Sampled, ScriptedEngine, assert_trained_as_sampled
from tests.support.templates import package_tokenizer, tokenizer_for

create_renderer(tokenizer_for(), AutoRendererConfig())  # Fills the registry.
NAMES = sorted(set(RENDERER_REGISTRY) - {"default", "gpt-oss"})  # The vocabulary of gpt-oss is on the network.
LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=8000, max_response_length=400, max_model_len=9000)
USER: Message = {"role": "user", "content": "What is 2 + 2?"}
AGAIN: Message = {"role": "user", "content": "Are you sure?"}
ANSWER: Message = {"role": "assistant", "content": "It is 4."}
RESULT: Message = {"role": "tool", "content": "4", "tool_call_id": "call00000", "name": "add"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
        },
    }
]
families = pytest.mark.parametrize("name", NAMES)


@cache
def form(name: str) -> ChatFormat:
    return ChatFormat.of(package_tokenizer(name), ModelConfig(path="x", renderer=name))


def named(name: str) -> Any:
    return config_from_name(name)


def found_name(tokenizer: Any) -> str | None:
    config = renderer_config(tokenizer, "auto")
    return None if config is None else config.name


def called(arguments: Any, call_id: str = "call00000") -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@families
@pytest.mark.parametrize("turn", ["text", "call"])
def test_the_bridge_gives_what_a_full_rendering_gives(name: str, turn: str) -> None:
    """Case 11: with a turn that says exactly what the family's own rendering of it says."""
    chat_format = form(name)
    message, new = (ANSWER, AGAIN) if turn == "text" else (called({"sum": "2 + 2"}), RESULT)
    history = normalise_messages([USER, message, new])
    prompt, whole = chat_format.render(history[:1], TOOLS), chat_format.render(history, TOOLS)
    said = next(i for i, token in enumerate(whole) if i == len(prompt) or token != prompt[i])
    end = next(i for i in range(said, len(whole)) if whole[i] in chat_format.stop_token_ids)
    sampled = whole[said : end + 1]
    bridged = chat_format.bridge(SampledTurn(history[:1], history[1], prompt, sampled), history[2:], TOOLS)
    if bridged is None:
        # A generation prompt that opens reasoning, which the full rendering of the turn does not have.
        assert said < len(prompt)
        return
    assert bridged == [*prompt, *sampled, *whole[end + 1 :]]
    parsed = chat_format.parse(prompt, sampled, TOOLS)
    assert parsed.invalid_tool_calls == ()
    if turn == "call" and "kimi" not in name:  # Whose ids are names.
        (call,) = parsed.tool_calls
        assert (call.name, call.arguments) == ("add", {"sum": "2 + 2"})


@families
@pytest.mark.parametrize("arguments", ['{"sum": "2 + 2"}', {"sum": "2 + 2"}, '{"sum": "2 + ', "", None])
def test_history_as_clients_send_it_renders(name: str, arguments: Any) -> None:
    """Case 15: and arguments that are no JSON are shown as they are, not as a call without any."""
    sent = [USER, called(arguments, "call_A1b2C3d4"), {"role": "tool", "content": "4", "tool_call_id": "call_A1b2C3d4"}]
    text = form(name).tokenizer.decode(form(name).render(normalise_messages(sent), TOOLS))
    assert "None" not in text
    if arguments:
        assert "2 + " in text.rpartition("What is 2 + 2?")[2]


@families
def test_the_model_gets_to_see_its_tools(name: str) -> None:
    assert "add" in form(name).tokenizer.decode(form(name).render([USER], TOOLS))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1030), min_size=1, max_size=12),
            st.booleans(),
            st.sampled_from([[AGAIN], [RESULT], [{"role": "tool", "content": "?"}], [RESULT, AGAIN]]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_is_sampled_is_trained_once_after_what_the_engine_saw(
    name: str, plan: list[tuple[list[int], bool, list[Message]]]
) -> None:
    """Tokens in any order, markup among them: nothing raises but a refusal of the messages."""
    chat_format = form(name)
    stops = chat_format.stop_token_ids
    sampled = [
        [*([token for token in ids if token not in stops] or [1]), *([stops[0]] if ends else [])]
        for ids, ends, _ in plan
    ]

    @asynchronous
    async def converse() -> None:
        engine = ScriptedEngine(lambda request: Sampled(sampled[len(engine.requests) - 1]))
        session = Session("e", chat_format, engine, LIMITS)
        history: list[Message] = [USER]
        for _, _, messages in plan:
            try:
                reply = await session.chat(history, TOOLS)
            except MessageError:
                break
            history = [*history, reply.message, *messages]
        assert_trained_as_sampled(session.graph.branches(), engine, sampled[: len(engine.requests)])

    converse()


def test_a_local_folder_gets_the_renderer_whose_tokens_are_those_of_its_template(tmp_path: Path) -> None:
    tokenizer = package_tokenizer("qwen3")
    reference: Any = create_renderer(tokenizer, named("qwen3"))

    def like_qwen3(messages: Any, tools: Any = None, **_: Any) -> list[int]:
        return reference.render_ids(messages, tools=tools, add_generation_prompt=True)

    tokenizer = tokenizer_for(template="stands for Qwen3's own")
    tokenizer.name_or_path = str(tmp_path)
    tokenizer.apply_chat_template = like_qwen3
    assert found_name(tokenizer) == "qwen3"
    tokenizer.apply_chat_template = lambda *args, **keys: [*like_qwen3(*args, **keys), 1]
    assert renderer_config(tokenizer, "auto") is None


def test_each_family_is_recognised_by_its_own_tokens_alone() -> None:
    """Another family's renderer that would pass for it gives the same tokens on all that is tried."""
    for name in NAMES:
        reference = create_renderer(package_tokenizer(name), named(name))
        tokenizer = copy.copy(package_tokenizer(name))
        tokenizer.chat_template = "stands for the family's own"

        def like(messages: Any, tools: Any = None, by: Any = reference, **_: Any) -> list[int]:
            return by.render_ids(messages, tools=tools, add_generation_prompt=True)

        tokenizer.apply_chat_template = like
        found = found_name(tokenizer)
        assert found == name or (name, found) in SAME, (name, found)


SAME = {("nemotron-3.5", "nemotron-3-ultra"), ("qwen3-vl", "qwen3")}
"""Renderers that give the same tokens: the first of them is taken."""


def test_a_model_of_the_hub_gets_its_renderer_by_name() -> None:
    tokenizer = tokenizer_for()
    tokenizer.name_or_path = next(model for model, name in MODEL_RENDERER_MAP.items() if name == "qwen3")
    assert found_name(tokenizer) == "qwen3"


def test_default_is_the_models_own_template() -> None:
    assert renderer_config(tokenizer_for(), "default") is None


def test_a_trained_model_saved_elsewhere_keeps_its_format(tmp_path: Path) -> None:
    path = str(tiny_model_path())
    first = ChatFormat.load(ModelConfig(path=path), path)
    first.tokenizer.save_pretrained(tmp_path)
    again = ChatFormat.load(ModelConfig(path=str(tmp_path)), str(tmp_path))
    assert again.render([USER], TOOLS) == first.render([USER], TOOLS)
    assert again.stop_token_ids == first.stop_token_ids
