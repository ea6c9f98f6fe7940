"""What is trained is what was sampled, after exactly what the engine saw: with the real template and tokenizer."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.record import Message
from agentrl.session import ChatFormat, SamplingLimits, Session
from tests.support.asynchrony import asynchronous
from tests.support.scripted import (
    Sampled,
    Script,
    ScriptedEngine,
    assert_trained_as_sampled,
    encode,
    says,
    turns,
)

LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=1000, max_response_length=200, max_model_len=1024)
USER: Message = {"role": "user", "content": "What is 2 + 2?"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
RESULT: Message = {"role": "tool", "content": "4"}


def session(chat_format: ChatFormat, script: Script) -> tuple[Session, ScriptedEngine]:
    engine = ScriptedEngine(script)
    return Session("e0", chat_format, engine, LIMITS), engine


@asynchronous
async def test_sampled_ids_that_do_not_survive_decoding_are_trained_as_sampled(chat_format: ChatFormat) -> None:
    """Case 10."""
    split = [token for letter in "hello" for token in encode(chat_format, letter)]
    assert encode(chat_format, chat_format.tokenizer.decode(split)) != split
    sampled = [*split, chat_format.stop_token_ids[0]]
    policy, engine = session(chat_format, lambda request: Sampled(sampled))
    reply = await policy.chat([USER])
    assert reply.text == "hello"
    await policy.chat([USER, reply.message, {"role": "tool", "content": "go on"}])
    (branch,) = policy.graph.branches()
    assert_trained_as_sampled([branch], engine, [sampled, sampled])


@asynchronous
async def test_the_bridge_gives_the_ids_of_the_full_template(chat_format: ChatFormat) -> None:
    """Case 11: the newline after `<|im_end|>` is there, and what the template inserts is not trained."""
    policy, engine = session(chat_format, turns(chat_format, CALL, "The answer is 4."))
    reply = await policy.chat([USER])
    history = [USER, reply.message, RESULT]
    await policy.chat(history)
    assert engine.requests[1].token_ids.tolist() == chat_format.render(history, None)
    (branch,) = policy.graph.branches()
    sampled = [says(chat_format, CALL).token_ids, says(chat_format, "The answer is 4.").token_ids]
    first = len(engine.requests[0].token_ids)
    inserted = branch.token_ids[first + len(sampled[0]) : len(engine.requests[1].token_ids)].tolist()
    assert chat_format.tokenizer.decode(inserted).startswith("\n<|im_start|>user\n<tool_response>\n4\n")
    assert branch.loss_mask.sum() == sum(len(ids) for ids in sampled)
    assert_trained_as_sampled([branch], engine, [list(ids) for ids in sampled])


@asynchronous
async def test_the_bridge_holds_over_many_turns_and_parallel_calls(template_format: ChatFormat) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}
    ]
    texts = (CALL, f"I try again.\n{CALL}\n{CALL}", "Done.")
    policy, engine = session(template_format, turns(template_format, *texts))
    history: list[Message] = [{"role": "system", "content": "Be exact."}, USER]
    for text in texts:
        assert engine.requests == [] or policy.graph.branches()
        reply = await policy.chat(history, tools)
        assert engine.requests[-1].token_ids.tolist() == template_format.render(history, tools), text
        results = [{"role": "tool", "content": str(i), "tool_call_id": c.id} for i, c in enumerate(reply.tool_calls)]
        history = [*history, reply.message, *results]
    (branch,) = policy.graph.branches()
    assert len(branch.turns) == 3


@asynchronous
async def test_without_thinking_a_dialogue_stays_one_branch_whatever_was_sampled(chat_format: ChatFormat) -> None:
    """White space that the reply's text does not show is in the ids, and stays there over further user turns."""
    said = ("  4 ", "\n5\n", " 6")
    policy, engine = session(chat_format, turns(chat_format, *said))
    messages = [USER]
    for _ in said:
        reply = await policy.chat(messages)
        messages = [*messages, reply.message, {"role": "user", "content": "Are you sure?"}]
    (branch,) = policy.graph.branches()
    sampled = [[*encode(chat_format, text), chat_format.stop_token_ids[0]] for text in said]
    assert_trained_as_sampled([branch], engine, sampled)


@asynchronous
async def test_thinking_that_the_template_strips_forks_the_graph(chat_format: ChatFormat) -> None:
    """Case 12: at the next question Qwen3 forgets earlier reasoning; each branch trains on what the model saw."""
    thought = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    policy, engine = session(chat_format, turns(chat_format, thought, thought))
    reply = await policy.chat([USER])
    assert (reply.reasoning, reply.text) == ("Two and two.", "It is 4.")
    await policy.chat([USER, reply.message, {"role": "user", "content": "And 3 + 3?"}])
    assert "Two and two" not in chat_format.tokenizer.decode(engine.requests[1].token_ids.tolist())
    branches = policy.graph.branches()
    sampled = list(says(chat_format, thought).token_ids)
    assert len(branches) == 2
    assert [branch.trained_tokens for branch in branches] == [len(sampled)] * 2
    assert_trained_as_sampled(branches, engine, [sampled, sampled])


@asynchronous
async def test_thinking_within_one_question_stays_in_one_branch(chat_format: ChatFormat) -> None:
    policy, engine = session(chat_format, turns(chat_format, f"<think>\nhm\n</think>\n\n{CALL}", "4"))
    reply = await policy.chat([USER])
    await policy.chat([USER, reply.message, RESULT])
    assert len(policy.graph.branches()) == 1
    assert "hm" in chat_format.tokenizer.decode(engine.requests[1].token_ids.tolist())


@asynchronous
async def test_a_call_cut_by_the_limit_keeps_its_raw_ids_and_is_no_call(chat_format: ChatFormat) -> None:
    """Case 13."""
    text = '<tool_call>\n{"name":"write_file","arguments":{"content":"abc'
    raw = encode(chat_format, text)
    policy, engine = session(chat_format, lambda request: Sampled([*raw, *raw]))
    reply = await policy.chat([USER], max_tokens=len(raw))
    assert (reply.finish_reason, reply.tool_calls) == ("length", ())
    assert reply.invalid_tool_calls == ('{"name":"write_file","arguments":{"content":"abc',)
    assert "{}" not in str(reply.message)
    (branch,) = policy.graph.branches()
    assert_trained_as_sampled([branch], engine, [raw])
    assert branch.turns[0].finish_reason == "length"


@asynchronous
async def test_a_turn_cut_by_the_limit_is_closed_by_tokens_that_are_not_trained(chat_format: ChatFormat) -> None:
    raw = encode(chat_format, "It is")
    policy, engine = session(chat_format, lambda request: Sampled(raw, "length"))
    reply = await policy.chat([USER])
    await policy.chat([USER, reply.message, {"role": "tool", "content": "go on"}])
    (branch,) = policy.graph.branches()
    assert_trained_as_sampled([branch], engine, [raw, raw])
    assert branch.token_ids[branch.turns[0].end] == chat_format.stop_token_ids[0]
    assert branch.loss_mask[branch.turns[0].end] == 0


@asynchronous
async def test_the_stop_token_is_trained_exactly_once(chat_format: ChatFormat) -> None:
    """Case 14."""
    policy, _ = session(chat_format, turns(chat_format, "One.", "Two.", "Three."))
    history = [USER]
    for _ in range(3):
        reply = await policy.chat(history)
        history = [*history, reply.message, {"role": "tool", "content": "go on"}]
    branches = policy.graph.branches()
    trained = [token for branch in branches for token in branch.token_ids[branch.loss_mask == 1].tolist()]
    assert trained.count(chat_format.stop_token_ids[0]) == 3


@asynchronous
async def test_another_stop_token_is_kept_where_it_was_sampled(chat_format: ChatFormat) -> None:
    im_end, endoftext = chat_format.stop_token_ids
    sampled = [*encode(chat_format, "Four"), endoftext]
    policy, engine = session(chat_format, lambda request: Sampled(sampled))
    reply = await policy.chat([USER])
    await policy.chat([USER, reply.message, {"role": "tool", "content": "go on"}])
    assert_trained_as_sampled(policy.graph.branches(), engine, [sampled, sampled])
    assert im_end != endoftext


@asynchronous
async def test_history_that_comes_back_through_a_client_still_extends_its_turn(chat_format: ChatFormat) -> None:
    """Case 15: arguments as a JSON string, null content, other ids, white space stripped: the same conversation."""
    policy, engine = session(chat_format, turns(chat_format, f"{CALL}", "4"))
    await policy.chat([USER])
    arguments = '{ "expression" : "2 + 2" }'
    call = {"id": "call_99", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    client: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call_99"},
    ]
    await policy.chat(client)
    assert len(policy.graph.branches()) == 1
    assert len(engine.requests) == 2


@asynchronous
async def test_an_edited_history_forks(chat_format: ChatFormat) -> None:
    policy, engine = session(chat_format, turns(chat_format, "It is 5.", "Yes."))
    reply = await policy.chat([USER])
    edited = {**reply.message, "content": "It is 4."}
    await policy.chat([USER, edited, {"role": "tool", "content": "sure?"}])
    sampled = [list(says(chat_format, text).token_ids) for text in ("It is 5.", "Yes.")]
    branches = policy.graph.branches()
    assert len(branches) == 2
    assert_trained_as_sampled(branches, engine, sampled)


@asynchronous
async def test_other_tools_are_told_to_the_model_and_fork(chat_format: ChatFormat) -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("search", "buy")]
    policy, engine = session(chat_format, turns(chat_format, "Hm.", "Yes."))
    reply = await policy.chat([USER], tools[:1])
    await policy.chat([USER, reply.message, {"role": "tool", "content": "?"}], tools)
    assert '"buy"' in chat_format.tokenizer.decode(engine.requests[1].token_ids.tolist())
    assert len(policy.graph.branches()) == 2


TEXTS = st.sampled_from(
    ["4", f"Hm.\n{CALL}", CALL, "<think>\nhm\n</think>\n\n4", "<think>\nopen", "a\u00e9\U0001f600", " "]
)
NEXT = st.sampled_from(["tool", "user", "edit", "system", "restart"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXTS, st.booleans(), NEXT), min_size=1, max_size=5))
def test_any_conversation_trains_each_turn_once_after_what_the_engine_saw(
    chat_format: ChatFormat, plan: list[tuple[str, bool, str]]
) -> None:
    """Turns that think, call, break off; histories that go on, are edited or begin again."""
    stop = chat_format.stop_token_ids[0]
    answers = [[*encode(chat_format, text), *([stop] if ends else [])] for text, ends, _ in plan]
    script = iter([Sampled(ids, "stop" if ids[-1] == stop else "length") for ids in answers])

    @asynchronous
    async def converse() -> None:
        policy, engine = session(chat_format, lambda request: next(script))
        history: list[Message] = [USER]
        for _, _, then in plan:
            reply = await policy.chat(history)
            message = reply.message
            if then == "edit":
                message = {**message, "content": "edited"}
            role = {"user": "user", "system": "system"}.get(then, "tool")
            history = [*history, message, {"role": role, "content": "next"}]
            if then == "restart":
                history = history[:1]
        assert_trained_as_sampled(policy.graph.branches(), engine, answers)

    converse()
