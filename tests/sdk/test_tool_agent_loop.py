"""`ToolAgentLoop` against a policy that says what the test wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.record import ContextOverflow, EngineError, EnvError, Reply, Task
from agentrl.sdk import AgentLoop, Env, Reward, ToolAgentLoop, ToolError, Transcript, tool
from tests.support.asynchrony import asynchronous
from tests.support.policy import ScriptedPolicy, answer, calls

TASK = Task("What is 6 * 7?", "42")


class Bench(Env):
    """Keeps what is done to it; `trouble` is raised by the method that it names."""

    def __init__(self, **trouble: Exception) -> None:
        self.trouble = trouble
        self.pressed: list[int] = []
        self.transcript: Transcript | None = None

    def _may_fail(self, where: str) -> None:
        if where in self.trouble:
            raise self.trouble[where]

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        self._may_fail("reset")
        return [{"role": "system", "content": "Press."}, *task.messages()]

    @tool
    async def press(self, button: int) -> str:
        """Presses a button."""
        self._may_fail("press")
        self.pressed.append(button)
        return f"pressed {button}"

    @tool
    async def read(self) -> str:
        """Reads a long manual."""
        return "x" * 100

    async def score(self, transcript: Transcript) -> Reward:
        self._may_fail("score")
        self.transcript = transcript
        return Reward(float(transcript.answer == transcript.task.answer))


async def play(env: Bench, *replies: Reply | Exception, **options: Any) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy(*replies)
    return await ToolAgentLoop(env, **options).run(TASK, policy), policy


def seen(env: Bench) -> Transcript:
    assert env.transcript is not None
    return env.transcript


@asynchronous
async def test_an_answer_without_a_call_ends_the_episode_and_is_scored() -> None:
    env = Bench()
    reward, policy = await play(env, answer("42"))
    assert reward == Reward(1.0)
    assert [message["role"] for message in policy.asked[0]] == ["system", "user"]
    assert [message["role"] for message in seen(env).messages] == ["system", "user", "assistant"]
    assert seen(env).truncated is False


@asynchronous
async def test_the_model_is_told_the_tools_of_the_environment() -> None:
    _, policy = await play(Bench(), answer("42"))
    assert [spec["function"]["name"] for spec in policy.tools[0] or ()] == ["press", "read"]


@asynchronous
async def test_an_environment_without_tools_sends_none() -> None:
    class Quiet(Env):
        async def score(self, transcript: Transcript) -> float:
            return 1.0

    policy = ScriptedPolicy(answer("hello"))
    assert await ToolAgentLoop(Quiet()).run(TASK, policy) == Reward(1.0)
    assert policy.tools == [None]
    assert policy.asked == [[{"role": "user", "content": "What is 6 * 7?"}]]


@asynchronous
async def test_tool_results_come_back_in_order_each_with_its_name_and_call() -> None:
    env = Bench()
    turn = calls(("press", {"button": 3}), ("press", {"button": 4}))
    _, policy = await play(env, turn, answer("42"))
    assert policy.asked[1][2:] == [
        turn.message,
        {"role": "tool", "content": "pressed 3", "tool_call_id": "c0", "name": "press"},
        {"role": "tool", "content": "pressed 4", "tool_call_id": "c1", "name": "press"},
    ]
    assert env.pressed == [3, 4]


@asynchronous
async def test_an_unknown_tool_is_the_models_mistake() -> None:
    _, policy = await play(Bench(), calls(("pull", {})), answer("42"))
    assert policy.asked[1][-1]["content"] == "Error: no tool 'pull'; there are: press, read"


@asynchronous
async def test_arguments_that_do_not_fit_are_refused_and_the_episode_goes_on() -> None:
    env = Bench()
    reward, policy = await play(env, calls(("press", {"button": "red"})), answer("42"))
    assert policy.asked[1][-1]["content"].startswith("Error: press: button: Input should be a valid integer")
    assert (reward, env.pressed) == (Reward(1.0), [])


@asynchronous
async def test_a_tool_error_is_shown_to_the_model() -> None:
    _, policy = await play(Bench(press=ToolError("it is stuck")), calls(("press", {"button": 1})), answer("42"))
    assert policy.asked[1][-1]["content"] == "Error: it is stuck"


@asynchronous
async def test_a_call_that_is_not_valid_is_refused_not_executed() -> None:
    env = Bench()
    broken = replace(answer(""), invalid_tool_calls=('{"name": "press", "arguments": {"button": 1',))
    reward, policy = await play(env, broken, answer("42"))
    assert policy.asked[1][-1]["role"] == "tool"
    assert policy.asked[1][-1]["content"].startswith("Error: not a valid tool call: {")
    assert (reward, env.pressed) == (Reward(1.0), [])


@asynchronous
async def test_a_turn_cut_by_the_token_limit_is_scored_as_truncated_and_its_calls_are_not_executed() -> None:
    env = Bench()
    cut = replace(calls(("press", {"button": 1})), finish_reason="length", invalid_tool_calls=('{"name": "pre',))
    reward, policy = await play(env, cut)
    assert (reward, env.pressed, seen(env).truncated) == (Reward(0.0), [], True)
    assert len(policy.asked) == 1


@asynchronous
async def test_the_turns_are_limited() -> None:
    env = Bench()
    turn = calls(("press", {"button": 1}))
    _, policy = await play(env, turn, turn, turn, max_turns=2)
    assert (len(policy.asked), env.pressed, seen(env).truncated) == (2, [1, 1], True)


@asynchronous
async def test_a_conversation_that_outgrows_the_context_is_scored_as_it_is() -> None:
    env = Bench()
    reward, _ = await play(env, calls(("press", {"button": 1}), text="42"), ContextOverflow("too long"))
    assert (reward, seen(env).truncated) == (Reward(1.0), True)


@asynchronous
async def test_a_first_prompt_too_long_for_the_context_is_nobodys_answer() -> None:
    env = Bench()
    with pytest.raises(ContextOverflow):
        await play(env, ContextOverflow("too long"))
    assert env.transcript is None


@asynchronous
async def test_long_tool_output_is_cut() -> None:
    _, policy = await play(Bench(), calls(("read", {})), answer("42"), max_tool_output=10)
    assert policy.asked[1][-1]["content"] == "x" * 10


@pytest.mark.parametrize("where", ["reset", "press", "score"])
@asynchronous
async def test_a_failure_of_the_machinery_passes_as_it_is(where: str) -> None:
    with pytest.raises(EnvError, match="the sandbox died"):
        await play(Bench(**{where: EnvError("the sandbox died")}), calls(("press", {"button": 1})), answer("42"))


@pytest.mark.parametrize(
    ("where", "crash"),
    [
        ("reset", KeyError("x")),
        ("press", KeyError("x")),
        ("score", KeyError("x")),
        ("press", TimeoutError("slow")),
        ("score", ValueError("could not convert string to float: 'x'")),
        ("reset", ValueError("bad seed")),
    ],
)
@asynchronous
async def test_a_crash_of_the_environment_is_no_judgement(where: str, crash: Exception) -> None:
    with pytest.raises(EnvError, match=type(crash).__name__) as caught:
        await play(Bench(**{where: crash}), calls(("press", {"button": 1})), answer("42"))
    assert caught.value.__cause__ is crash


@asynchronous
async def test_a_failing_engine_is_not_the_environments_fault() -> None:
    with pytest.raises(EngineError):
        await play(Bench(), EngineError("gone"))


def test_a_loop_without_run_says_what_to_define() -> None:
    class Empty(AgentLoop):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define `async def run"):
        Empty().run(TASK, ScriptedPolicy())


@asynchronous
async def test_an_environment_without_score_says_what_to_define() -> None:
    class Empty(Env):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define `async def score"):
        await Empty().score(Transcript(TASK, [], [], truncated=False))


def test_the_answer_is_the_last_turns_text() -> None:
    assert Transcript(TASK, [], [answer("1"), answer("2")], truncated=False).answer == "2"
    assert Transcript(TASK, [], [], truncated=True).answer == ""
