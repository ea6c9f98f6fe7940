"""The policy in the hands of an agent: what it asks of the engine, rewards, and its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentrl.record import ContextOverflow, EngineError, EpisodeClosed, Message, MessageError
from agentrl.session import ChatFormat, SamplingLimits, Session
from tests.support.asynchrony import asynchronous, until
from tests.support.scripted import Sampled, ScriptedEngine, encode, says, turn_number, turns

LIMITS = SamplingLimits(temperature=0.7, max_prompt_length=100, max_response_length=50, max_model_len=120)
USER: Message = {"role": "user", "content": "2 + 2?"}


def engine_for(chat_format: ChatFormat, *texts: str) -> ScriptedEngine:
    return ScriptedEngine(turns(chat_format, *(texts or ("It is 4.",))))


@asynchronous
async def test_a_request_says_how_to_sample(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    engine.version = 5
    await Session("g3.1", chat_format, engine, LIMITS, min_version=5).chat([USER])
    (request,) = engine.requests
    assert request.token_ids.tolist() == chat_format.render([USER], None)
    assert (request.request_id, request.temperature, request.min_version) == ("g3.1:0", 0.7, 5)
    assert request.stop_token_ids == chat_format.stop_token_ids
    assert request.max_tokens == 50


@asynchronous
async def test_the_turn_remembers_its_temperature_and_versions(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    engine.version = 3
    policy = Session("e", chat_format, engine, LIMITS)
    await policy.chat([USER])
    (branch,) = policy.graph.branches()
    assert branch.turns[0].temperature == 0.7
    assert branch.oldest_version == 3


@pytest.mark.parametrize(("asked", "given"), [(None, 50), (20, 20), (80, 50), (1, 1)])
@asynchronous
async def test_an_agent_can_only_lower_the_token_limit(chat_format: ChatFormat, asked: int | None, given: int) -> None:
    engine = engine_for(chat_format)
    await Session("e", chat_format, engine, LIMITS).chat([USER], max_tokens=asked)
    assert engine.requests[0].max_tokens == given


@asynchronous
async def test_a_long_prompt_leaves_less_room_for_the_response(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    policy = Session("e", chat_format, engine, LIMITS)
    await policy.generate([1] * 100)
    assert engine.requests[0].max_tokens == 20


@pytest.mark.parametrize("limits", [LIMITS, replace(LIMITS, max_prompt_length=200, max_model_len=101)])
@asynchronous
async def test_a_prompt_that_does_not_fit_is_an_overflow_and_never_reaches_the_engine(
    chat_format: ChatFormat, limits: SamplingLimits
) -> None:
    engine = engine_for(chat_format)
    policy = Session("e", chat_format, engine, limits)
    with pytest.raises(ContextOverflow, match=r"the prompt has 101 tokens; data\.max_prompt_length"):
        await policy.generate([1] * 101)
    assert engine.requests == []


@pytest.mark.parametrize("limit", [0, -1])
@asynchronous
async def test_a_limit_below_one_token_is_refused(chat_format: ChatFormat, limit: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        await Session("e", chat_format, engine_for(chat_format), LIMITS).chat([USER], max_tokens=limit)


@asynchronous
async def test_an_empty_prompt_is_refused(chat_format: ChatFormat) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        await Session("e", chat_format, engine_for(chat_format), LIMITS).generate([])


@asynchronous
async def test_every_request_has_a_seed_of_its_own_that_a_second_run_has_too(chat_format: ChatFormat) -> None:
    """Case 9."""

    async def seeds(run_seed: int) -> list[int]:
        engine = engine_for(chat_format)
        for member in range(4):
            policy = Session(f"g0.{member}", chat_format, engine, LIMITS, seed=run_seed)
            await policy.chat([USER])
            await policy.chat([USER])
        return [request.seed for request in engine.requests]

    first = await seeds(1)
    assert len(set(first)) == 8
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)
    assert all(0 <= seed < 2**63 for seed in first)


@asynchronous
async def test_token_level_calls_get_ids_and_logprobs(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format, "one", "two")
    policy = Session("e", chat_format, engine, LIMITS)
    await policy.generate([5, 6])
    completion = await policy.generate([5, 6, 7])
    assert completion.token_ids == list(says(chat_format, "two").token_ids)
    assert len(completion.logprobs) == len(completion.token_ids)
    assert (completion.finish_reason, completion.turn) == ("stop", 1)


@asynchronous
async def test_a_token_level_call_that_extends_another_stays_in_its_branch(chat_format: ChatFormat) -> None:
    policy = Session("e", chat_format, engine_for(chat_format, "one", "two"), LIMITS)
    first = await policy.generate([5, 6])
    await policy.generate([5, 6, *first.token_ids, 7])
    assert len(policy.graph.branches()) == 1


@pytest.mark.parametrize(
    ("text", "finish_reason"),
    [("4", "stop"), ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "tool_calls"), ("4 " * 60, "length")],
)
@asynchronous
async def test_a_reply_says_why_it_ended(chat_format: ChatFormat, text: str, finish_reason: str) -> None:
    reply = await Session("e", chat_format, engine_for(chat_format, text), LIMITS).chat([USER])
    assert reply.finish_reason == finish_reason


@asynchronous
async def test_each_call_has_an_id_of_its_own_that_every_template_takes(chat_format: ChatFormat) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    policy = Session("e", chat_format, engine_for(chat_format, f"{call}\n{call}", call), LIMITS)
    replies = [await policy.chat([USER]) for _ in range(2)]
    ids = [made.id for reply in replies for made in reply.tool_calls]
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@asynchronous
async def test_another_attempt_of_an_episode_has_requests_and_random_numbers_of_its_own(
    chat_format: ChatFormat,
) -> None:
    engine = engine_for(chat_format)
    for attempt in (1, 2, 3):
        await Session("g3.1", chat_format, engine, LIMITS, attempt=attempt).chat([USER])
    assert [request.request_id for request in engine.requests] == ["g3.1:0", "g3.1~2:0", "g3.1~3:0"]
    assert len({request.seed for request in engine.requests}) == 3


@asynchronous
async def test_the_limits_of_an_episode_that_measures_reach_the_engine(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    policy = Session("e", chat_format, engine, replace(LIMITS, top_p=0.5, top_k=7, stop=("END",)))
    await policy.chat([USER], stop=["\n\n", "END"])
    await policy.generate([1], stop="one")
    asked = [(request.top_p, request.top_k, request.stop) for request in engine.requests]
    assert asked == [(0.5, 7, ("END", "\n\n")), (0.5, 7, ("END", "one"))]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "rest"),
    [
        ("I look. Observation: 5", "Observation:", "I look.", " 5"),
        ("I look.\n\nMore.", "\n\n", "I look.", "More."),
        ("One\nEND\nTwo", "\nEND\n", "One", "Two"),
        ("Yes, yes", ",", "Yes", " yes"),
        ("<think>\nhm STOP\n</think>\n\n4", "STOP", "", "\n</think>\n\n4"),
    ],
)
@asynchronous
async def test_a_stop_text_ends_the_turn_is_trained_and_is_not_shown(
    chat_format: ChatFormat, text: str, stop: str, shown: str, rest: str
) -> None:
    engine = ScriptedEngine(turns(chat_format, text, "4"), decode=chat_format.tokenizer.decode)
    policy = Session("e", chat_format, engine, LIMITS)
    reply = await policy.chat([USER], stop=[stop])
    assert (reply.text, reply.finish_reason) == (shown, "stop")
    assert stop not in reply.text + reply.reasoning
    (branch,) = policy.graph.branches()
    trained = chat_format.tokenizer.decode(branch.token_ids[branch.loss_mask == 1].tolist())
    assert stop in trained and rest not in trained
    if not reply.reasoning:
        await policy.chat([USER, reply.message, {"role": "user", "content": "Go on."}])
        assert len(policy.graph.branches()) == 1


@asynchronous
async def test_a_stop_text_that_ends_a_call_does_not_break_it(chat_format: ChatFormat) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = ScriptedEngine(turns(chat_format, f"{call}\n{call}"), decode=chat_format.tokenizer.decode)
    reply = await Session("e", chat_format, engine, LIMITS).chat([USER], stop=["</tool_call>"])
    assert ([made.name for made in reply.tool_calls], reply.invalid_tool_calls) == (["f"], ())


@asynchronous
async def test_a_stop_text_within_a_call_leaves_no_call(chat_format: ChatFormat) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "a STOP b"}}\n</tool_call>'
    engine = ScriptedEngine(turns(chat_format, call), decode=chat_format.tokenizer.decode)
    reply = await Session("e", chat_format, engine, LIMITS).chat([USER], stop=["STOP"])
    assert (reply.tool_calls, reply.finish_reason) == ((), "stop")
    assert reply.invalid_tool_calls == ('{"name": "f", "arguments": {"x": "a',)


@asynchronous
async def test_a_text_that_only_looks_like_a_stop_text_is_shown_where_a_stop_token_ended_the_turn(
    chat_format: ChatFormat,
) -> None:
    policy = Session("e", chat_format, engine_for(chat_format, "The END"), LIMITS)
    assert (await policy.chat([USER], stop=["END\n"])).text == "The END"


@pytest.mark.parametrize("stop", [[""], [3], ["a", None]])
@asynchronous
async def test_stop_texts_must_be_texts(chat_format: ChatFormat, stop: list[str]) -> None:
    with pytest.raises(ValueError, match="use texts of at least one character"):
        await Session("e", chat_format, engine_for(chat_format), LIMITS).chat([USER], stop=stop)


@asynchronous
async def test_an_overflow_names_both_limits(chat_format: ChatFormat) -> None:
    with pytest.raises(
        ContextOverflow, match=r"101 tokens; data\.max_prompt_length is 100, rollout\.max_model_len 120"
    ):
        await Session("e", chat_format, engine_for(chat_format), LIMITS).generate([1] * 101)


@asynchronous
async def test_after_the_end_nothing_is_sampled(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    policy = Session("e7", chat_format, engine, LIMITS)
    policy.close()
    for call in (policy.chat([USER]), policy.generate([1])):
        with pytest.raises(EpisodeClosed, match="episode e7 has ended"):
            await call
    assert engine.requests == []


@asynchronous
async def test_an_answer_that_comes_after_the_end_is_not_recorded(chat_format: ChatFormat) -> None:
    answered = asyncio.Event()

    async def late(_request: object) -> Sampled:
        await answered.wait()
        return says(chat_format, "4")

    engine = ScriptedEngine(late)
    policy = Session("e", chat_format, engine, LIMITS)
    call = asyncio.ensure_future(policy.chat([USER]))
    await until(lambda: bool(engine.requests))
    policy.close()
    answered.set()
    with pytest.raises(EpisodeClosed):
        await call
    assert policy.graph.branches() == []


@asynchronous
async def test_a_turn_can_be_given_a_reward_of_its_own(chat_format: ChatFormat) -> None:
    policy = Session("e", chat_format, engine_for(chat_format, "one", "two", "three"), LIMITS)
    for _ in range(3):
        await policy.generate([1])
    policy.reward(0.5, turn=1)
    policy.reward(2)
    policy.reward(3)
    rewards = [turn.reward for branch in policy.graph.branches() for turn in branch.turns]
    assert rewards == [None, 0.5, 3.0]


@pytest.mark.parametrize(("turn", "says_"), [(1, "no turn 1: the episode has 1 turns"), (-1, "no turn -1")])
@asynchronous
async def test_only_turns_that_were_can_be_rewarded(chat_format: ChatFormat, turn: int, says_: str) -> None:
    policy = Session("e", chat_format, engine_for(chat_format), LIMITS)
    await policy.generate([1])
    with pytest.raises(ValueError, match=says_):
        policy.reward(1.0, turn=turn)
    with pytest.raises(ValueError, match="must be finite"):
        policy.reward(float("nan"))


@asynchronous
async def test_without_a_turn_there_is_nothing_to_reward(chat_format: ChatFormat) -> None:
    with pytest.raises(ValueError, match="the episode has 0 turns"):
        Session("e", chat_format, engine_for(chat_format), LIMITS).reward(1.0)


@asynchronous
async def test_two_sub_agents_under_one_session_are_two_branches(chat_format: ChatFormat) -> None:
    """Case 36: they talk at the same time, their tokens interleave, and yet neither is in the other's history."""
    step = asyncio.Barrier(2)

    async def in_step(_request: object, position: int) -> None:
        if position == 0:
            await step.wait()

    def script(request: object) -> Sampled:
        who = chat_format.tokenizer.decode(engine.requests[-1].token_ids.tolist())
        return says(chat_format, "I am A" if "agent A" in who else "I am B")

    engine = ScriptedEngine(script)
    engine.before_token = in_step
    policy = Session("e", chat_format, engine, LIMITS)

    async def sub_agent(name: str) -> list[str]:
        history: list[Message] = [{"role": "user", "content": f"agent {name}"}]
        said = []
        for _ in range(3):
            reply = await policy.chat(history)
            said.append(reply.text)
            history = [*history, reply.message, {"role": "tool", "content": "go on"}]
        return said

    said = await asyncio.gather(sub_agent("A"), sub_agent("B"))
    assert said == [["I am A"] * 3, ["I am B"] * 3]
    branches = policy.graph.branches()
    assert sorted(len(branch.turns) for branch in branches) == [3, 3]
    for branch in branches:
        text = chat_format.tokenizer.decode(branch.token_ids.tolist())
        assert ("agent A" in text, "I am A" in text) != ("agent B" in text, "I am B" in text)


@pytest.mark.parametrize("sampled", [0, 3])
@asynchronous
async def test_a_request_that_somebody_else_ended_is_no_answer(chat_format: ChatFormat, sampled: int) -> None:
    tokens = encode(chat_format, "abc def ghi")[:sampled]
    policy = Session("e", chat_format, ScriptedEngine(lambda request: Sampled(tokens, "abort")), LIMITS)
    with pytest.raises(EngineError, match=f"aborted by its engine after {sampled} tokens"):
        await policy.chat([USER])
    assert policy.graph.turns == []


@asynchronous
async def test_an_engines_refusal_reaches_the_agent_and_the_session_goes_on(chat_format: ChatFormat) -> None:
    good = says(chat_format, "4")
    engine = ScriptedEngine(lambda request: EngineError("busy") if turn_number(request) == 0 else good)
    policy = Session("e", chat_format, engine, LIMITS)
    with pytest.raises(EngineError, match="busy"):
        await policy.chat([USER])
    assert (await policy.chat([USER])).text == "4"


@asynchronous
async def test_messages_that_no_template_can_render_are_refused(chat_format: ChatFormat) -> None:
    with pytest.raises(MessageError):
        await Session("e", chat_format, engine_for(chat_format), LIMITS).chat([])


@asynchronous
async def test_an_episode_of_one_version_is_spoiled_when_the_weights_change(chat_format: ChatFormat) -> None:
    engine = engine_for(chat_format)
    policy = Session("e", chat_format, engine, LIMITS, one_version=True)
    reply = await policy.chat([USER])
    engine.version = 1
    with pytest.raises(EngineError, match=r"the weights changed within the episode \(policy versions 0, 1\)"):
        await policy.chat([USER, reply.message, USER])
    assert len(policy.graph.turns) == 1, "what would mix versions is not recorded"
