"""Chat templates of all kinds, known by nothing but what they render: what is trained is what was sampled, and prompts
are built on it only where the template would say the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema import ModelConfig
from agentrl.record import Message, MessageError
from agentrl.record.messages import normalise_messages
from agentrl.session import ChatFormat, SampledTurn, SamplingLimits, Session
from tests.support.asynchrony import asynchronous
from tests.support.scripted import Sampled, ScriptedEngine, assert_trained_as_sampled, encode
from tests.support.templates import FAMILIES, family_format, tokenizer_for

LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=8000, max_response_length=400, max_model_len=9000)
USER: Message = {"role": "user", "content": "What is 2 + 2?"}
AGAIN: Message = {"role": "user", "content": "Are you sure?"}
RESULT: Message = {"role": "tool", "content": "4"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}},
        },
    }
]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"sum": "2 + 2"}}\n</tool_call>'
CALLS = dict.fromkeys(FAMILIES, HERMES) | {
    "llama-3": '{"name": "add", "parameters": {"sum": "2 + 2"}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"sum": "2 + 2"}}]',
    "deepseek-r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"sum": "2 + 2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm": "\n<tool_call>add\n<arg_key>sum</arg_key>\n<arg_value>2 + 2</arg_value>\n</tool_call>",
}
STOPS = {name: family.stop for name, family in FAMILIES.items()}
AFTER_CALL = STOPS | {"glm": "<|observation|>"}
"""What a model of the family ends a turn with when it waits for a tool."""
ENDS = [name for name, family in FAMILIES.items() if family.bridges]
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def form(name: str) -> ChatFormat:
    return family_format(name)


def said(name: str, text: str, stop: str | None = None) -> list[int]:
    return encode(form(name), text + (STOPS[name] if stop is None else stop))


async def converse(name: str, sampled: list[list[int]], follow: list[list[Message]], tools: Any = None) -> Any:
    """Plays turns that say `sampled`, each but the last followed by some messages."""
    chat_format = form(name)
    engine = ScriptedEngine(lambda request: Sampled(sampled[len(engine.requests) - 1]))
    session = Session("e", chat_format, engine, LIMITS)
    history: list[Message] = [USER]
    replies = []
    for ids, messages in zip(sampled, [*follow, []], strict=True):
        reply = await session.chat(history, tools)
        replies.append(reply)
        rendered = chat_format.render(normalise_messages([*history]), tools)
        assert_as_template(engine.requests, rendered, sampled)
        history = [*history, reply.message, *messages]
        assert ids == session.graph.turns[-1].token_ids.tolist()
    assert_trained_as_sampled(session.graph.branches(), engine, sampled)
    return session, engine, replies


def assert_as_template(requests: list[Any], rendered: list[int], sampled: list[list[int]]) -> None:
    """The newest prompt is the template's, or an earlier turn with its tokens and an end that is the template's."""
    prompt = requests[-1].token_ids.tolist()
    if prompt == rendered:
        return
    starts = [[*earlier.token_ids.tolist(), *ids] for earlier, ids in zip(requests[:-1], sampled, strict=False)]
    built_on = [start for start in starts if prompt[: len(start)] == start]
    tail = prompt[len(max(built_on, key=len)) :]
    assert tail and rendered[-len(tail) :] == tail


@pytest.mark.parametrize("name", ENDS)
@asynchronous
async def test_a_dialogue_is_one_branch_and_each_prompt_is_what_the_template_gives(name: str) -> None:
    """Cases 11 and 14: nothing of what stands between turns is missing or there twice."""
    sampled = [said(name, text) for text in ("It is 4.", "Yes.", "Very.")]
    session, engine, replies = await converse(name, sampled, [[AGAIN], [AGAIN]])
    (branch,) = session.graph.branches()
    history: list[Message] = []
    for request, reply in zip(engine.requests, replies, strict=True):
        history = [*history, USER if not history else AGAIN]
        if name != "llama-2":  # Writes spaces around a turn that the model did not say.
            assert request.token_ids.tolist() == form(name).render(history)
        history = [*history, reply.message]
    trained = branch.token_ids[branch.loss_mask == 1].tolist()
    (stop,) = encode(form(name), STOPS[name])
    assert trained.count(stop) == 3
    assert stop in form(name).stop_token_ids


@pytest.mark.parametrize("name", sorted(set(ENDS) - {"mistral"}))
@asynchronous
async def test_a_tools_answer_is_built_upon_the_call(name: str) -> None:
    sampled = [said(name, CALLS[name], AFTER_CALL[name]), said(name, "It is 4.")]
    session, engine, replies = await converse(name, sampled, [[RESULT]], TOOLS)
    (call,) = replies[0].tool_calls
    assert (call.name, call.arguments, replies[0].text) == ("add", {"sum": "2 + 2"}, "")
    assert len(session.graph.branches()) == 1
    assert "4" in form(name).tokenizer.decode(engine.requests[1].token_ids.tolist())


@asynchronous
async def test_a_template_that_moves_the_tools_to_the_last_question_forks_there_and_only_there() -> None:
    name = "mistral"
    sampled = [said(name, CALLS[name]), said(name, "It is 4."), said(name, "Yes.")]
    session, _, _ = await converse(name, sampled, [[RESULT], [AGAIN]], TOOLS)
    assert [len(branch.turns) for branch in session.graph.branches()] == [2, 1]


@families
@asynchronous
async def test_the_model_gets_to_see_its_tools_in_every_template(name: str) -> None:
    """A template that knows no tools would leave them out without a word; so would one that knows no calls."""
    chat_format = form(name)
    (call,) = chat_format.parse([], said(name, CALLS[name]), TOOLS).tool_calls
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": call.name, "arguments": call.arguments}}],
    }
    history = normalise_messages([USER, message, RESULT])
    text = chat_format.tokenizer.decode(chat_format.render(history, TOOLS))
    assert text.count("add") >= 2 and "2 + 2" in text.partition("What is 2 + 2?")[2]
    assert "4" in text.rpartition("2 + 2")[2]


@families
@asynchronous
async def test_sampled_ids_that_do_not_survive_decoding_are_trained_as_sampled(name: str) -> None:
    """Case 10."""
    split = [token for letter in "hello" for token in encode(form(name), letter)]
    assert encode(form(name), form(name).tokenizer.decode(split)) != split
    sampled = [[*split, *said(name, "")], said(name, "Yes.")]
    session, _, replies = await converse(name, sampled, [[AGAIN]])
    assert replies[0].text == "hello"
    assert len(session.graph.branches()) == (1 if name in ENDS else 2)


@families
@asynchronous
async def test_a_turn_cut_by_the_limit_is_closed_by_tokens_that_are_not_trained(name: str) -> None:
    raw = encode(form(name), "It is")
    sampled = [raw, said(name, "Yes.")]
    session, engine, _ = await converse(name, sampled, [[AGAIN]])
    branches = session.graph.branches()
    if name in ENDS and name != "llama-2":
        (branch,) = branches
        end = branch.turns[0].end
        assert branch.token_ids[end] == encode(form(name), STOPS[name])[0]
        assert branch.loss_mask[end] == 0
    assert len(engine.requests) == 2


@families
@asynchronous
async def test_a_call_cut_by_the_limit_is_no_call(name: str) -> None:
    """Case 13."""
    text = CALLS[name][: CALLS[name].index("2 + 2")]
    sampled = [encode(form(name), text), said(name, "Yes.")]
    _, _, replies = await converse(name, sampled, [[AGAIN]], TOOLS)
    assert replies[0].tool_calls == ()
    assert len(replies[0].invalid_tool_calls) == 1
    assert "{}" not in str(replies[0].message)


@pytest.mark.parametrize("name", ["thinking", "deepseek-r1"])
@asynchronous
async def test_reasoning_that_the_template_strips_forks(name: str) -> None:
    """Case 12."""
    thought = said(name, "<think>\nTwo and two.\n</think>\n\nIt is 4.")
    session, engine, replies = await converse(name, [thought, thought], [[AGAIN]])
    assert (replies[0].reasoning, replies[0].text) == ("Two and two.", "It is 4.")
    assert "Two and two" not in form(name).tokenizer.decode(engine.requests[1].token_ids.tolist())
    assert [branch.trained_tokens for branch in session.graph.branches()] == [len(thought)] * 2


@asynchronous
async def test_reasoning_that_the_template_keeps_within_one_question_does_not_fork() -> None:
    name = "thinking"
    sampled = [said(name, f"<think>\nhm\n</think>\n\n{CALLS[name]}"), said(name, "It is 4.")]
    session, engine, _ = await converse(name, sampled, [[RESULT]], TOOLS)
    assert len(session.graph.branches()) == 1
    assert "hm" in form(name).tokenizer.decode(engine.requests[1].token_ids.tolist())


@asynchronous
async def test_a_template_that_knows_no_reasoning_keeps_what_was_said() -> None:
    sampled = [said("chatml", "<think>\nhm\n</think>\n\n4"), said("chatml", "Yes.")]
    session, _, replies = await converse("chatml", sampled, [[AGAIN]])
    assert (replies[0].reasoning, replies[0].text) == ("hm", "4")
    assert len(session.graph.branches()) == 1


@asynchronous
async def test_a_turn_that_breaks_off_within_its_reasoning_is_not_built_upon() -> None:
    sampled = [encode(form("chatml"), "<think>\nhm"), said("chatml", "Yes.")]
    session, _, replies = await converse("chatml", sampled, [[AGAIN]])
    assert (replies[0].reasoning, replies[0].text) == ("hm", "")
    assert len(session.graph.branches()) == 2


@asynchronous
async def test_a_stop_token_that_opens_the_next_role_is_trained_once() -> None:
    """Case 14: with the role the model expected it is built upon, with another one the graph forks."""
    user, observation = encode(form("glm"), "<|user|><|observation|>")
    for follow, branches in ((AGAIN, 1), (RESULT, 2)):
        session, engine, _ = await converse("glm", [said("glm", "4"), said("glm", "Yes.")], [[follow]])
        assert len(session.graph.branches()) == branches
        trained = [t for b in session.graph.branches() for t in b.token_ids[b.loss_mask == 1].tolist()]
        assert trained.count(user) == 2
        prompt = engine.requests[1].token_ids.tolist()
        assert prompt.count(user) + prompt.count(observation) == 2


@asynchronous
async def test_a_stop_token_that_the_template_does_not_write_forks() -> None:
    sampled = [said("phi", "4", "<|end_of_doc|>"), said("phi", "Yes.")]
    session, _, _ = await converse("phi", sampled, [[AGAIN]])
    assert len(session.graph.branches()) == 2


@pytest.mark.parametrize("name", ["script", "users-end"])
@asynchronous
async def test_a_template_that_does_not_mark_the_end_of_a_turn_is_never_built_upon(name: str) -> None:
    sampled = [said(name, text, "</s>") for text in ("4", "Yes.")]
    session, _, _ = await converse(name, sampled, [[AGAIN]])
    assert len(session.graph.branches()) == 2


TEXTS = ["4", " 4 \n", "", "<think>\nhm\n</think>\n\n4", "<think>\nopen", "a\u00e9\U0001f600", "{}", "call"]
NEXT = [[AGAIN], [RESULT], [RESULT, RESULT], [RESULT, AGAIN], [{"role": "user", "content": ""}]]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(
        st.tuples(
            st.sampled_from(TEXTS) | st.lists(st.integers(0, 980), min_size=1, max_size=6),
            st.sampled_from(["stop", "eos", "cut"]),
            st.sampled_from(NEXT),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_any_conversation_in_any_template_trains_each_turn_once_after_what_the_engine_saw(
    name: str, plan: list[tuple[str | list[int], str, list[Message]]], with_tools: bool
) -> None:
    """And builds on a turn only with an end that the template itself gives; a refusal is a typed error."""
    chat_format = form(name)
    sampled = []
    for text, ends, _ in plan:
        ids = text if isinstance(text, list) else encode(chat_format, CALLS[name] if text == "call" else text)
        closing = {"stop": said(name, ""), "eos": encode(chat_format, FAMILIES[name].eos), "cut": []}[ends]
        sampled.append([*ids, *closing] or [1])

    @asynchronous
    async def play() -> None:
        try:
            await converse(name, sampled, [messages for _, _, messages in plan[:-1]], TOOLS if with_tools else None)
        except MessageError as error:
            assert name in ("gemma", "mistral", "llama-3"), error

    play()


@families
@pytest.mark.parametrize("arguments", ['{"sum": "2 + 2"}', {"sum": "2 + 2"}, '{"sum": "2 + ', "", None])
def test_history_as_clients_send_it_renders_in_every_template(name: str, arguments: Any) -> None:
    """Case 15: arguments as text, as broken text, null content, foreign ids."""
    call = {"id": "call_A1b2C3d4E5f6", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {**RESULT, "tool_call_id": "call_A1b2C3d4E5f6"},
    ]
    text = form(name).tokenizer.decode(form(name).render(normalise_messages(history), TOOLS))
    assert "None" not in text
    if arguments:
        assert "2 + " in text.partition("What is 2 + 2?")[2]


def test_a_template_that_writes_arguments_down_as_they_come_gets_them_as_json_text() -> None:
    family = FAMILIES["hermes"]
    template = family.template.replace("call.function.arguments | tojson +", "call.function.arguments +")
    assert template != family.template
    chat_format = ChatFormat.of(tokenizer_for(template=template), ModelConfig(path="x"))
    call = {"id": "c", "function": {"name": "add", "arguments": {"sum": "2 + 2"}}}
    history = normalise_messages([USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT])
    assert chat_format.render(history, TOOLS) == form("hermes").render(history, TOOLS)


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(MessageError, match="refuses the messages: Conversation roles must alternate"):
        form("gemma").render([USER, AGAIN])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.system])
def test_a_template_without_system_messages_says_where_to_put_them(name: str) -> None:
    with pytest.raises(MessageError, match="no place for a system message: say it in the first user message"):
        form(name).render([{"role": "system", "content": "Be brief."}, USER])


def test_a_model_without_a_template_can_still_be_used_token_by_token() -> None:
    chat_format = ChatFormat.of(tokenizer_for(), ModelConfig(path="x"))
    assert chat_format.stop_token_ids == (chat_format.tokenizer.eos_token_id,)
    with pytest.raises(MessageError, match="no chat template: use policy"):
        chat_format.render([USER])


def test_tools_that_the_asked_for_template_would_not_show_are_refused() -> None:
    chat_format = family_format("chatml", tool_prompt="template")
    assert chat_format.render([USER])
    with pytest.raises(MessageError, match="does not show tools"):
        chat_format.render([USER], TOOLS)


def test_plain_text_tools_are_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    chat_format = family_format("zephyr")
    for _ in range(3):
        chat_format.render([USER], TOOLS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "knows no tools" in caplog.text


def test_a_template_that_changes_with_the_day_forks_overnight(monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = form("llama-3")
    prompt = chat_format.render([USER])
    turn = SampledTurn([USER], {"role": "assistant", "content": "4"}, prompt, said("llama-3", "4"))
    assert chat_format.bridge(turn, [AGAIN]) is not None
    # Each rendering is on another day.
    days = iter(range(1, 10))
    render = chat_format.tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat_format.tokenizer,
        "apply_chat_template",
        lambda *args, **keys: render(*args, date_string=f"{next(days)} Jan 2026", **keys),
    )
    assert chat_format.bridge(turn, [AGAIN]) is None
