"""Episodes that infrastructure spoiled are played again, as the same episodes; those nobody judged may be scored."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl import AgentLoop, EnvError, Policy, Task
from agentrl.record import ContextOverflow, EngineError, Fate, RolloutEnded
from agentrl.record.protocols import GenerateRequest
from agentrl.rollout import Outcome
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.rollout import (
    HeldEngine,
    NumberLoop,
    attempt_number,
    build_worker,
    count_fates,
    cut,
    member_says,
    play_episode,
    read_fates,
    rollout_config,
    running,
    train,
)
from tests.support.scripted import Answer, Script, ScriptedEngine, member_number, says, turns

ON_POLICY = "rollout.max_head_offpolicyness=0"


def failing(script: Script, attempts: int) -> Script:
    """The first attempts of member 0 of the first group fail in the engine."""

    def answer(request: GenerateRequest) -> Any:
        spoiled = request.request_id.startswith("g0.0") and attempt_number(request) <= attempts
        return EngineError("out of memory") if spoiled else script(request)

    return answer


@asynchronous
async def test_an_episode_that_its_engine_spoiled_is_played_again_as_the_same_episode(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    engine = ScriptedEngine(failing(member_says(chat_format), 1))
    worker = build_worker(rollout_config(tmp_path, ON_POLICY), chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        assert sorted(t.episode_id for t in batch.trajectories) == ["g0.0", "g0.1", "g1.0", "g1.1"]
        assert (await worker.status()).dispatched == 4
        assert batch.metrics["episode/failed"] == 0
        await worker.acknowledge(batch.id)
    rows = {row["episode_id"]: row for row in read_fates(tmp_path)}
    assert {name: row["attempts"] for name, row in rows.items()} == {"g0.0": 2, "g0.1": 1, "g1.0": 1, "g1.1": 1}
    assert {row["fate"] for row in rows.values()} == {"trained"}
    tries = [request for request in engine.requests if request.request_id.startswith("g0.0")]
    assert [request.request_id for request in tries] == ["g0.0:0", "g0.0~2:0"]
    assert tries[0].seed != tries[1].seed, "it does not fail the same way again"


@asynchronous
async def test_after_as_many_attempts_as_it_may_have_it_has_failed(tmp_path: Path, chat_format: ChatFormat) -> None:
    plays: Counter[int] = Counter()

    class Sandboxed(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            plays[task.index] += 1
            reply = await policy.chat(task.messages())
            if task.index == 0:
                raise EnvError("the sandbox died")
            return float(reply.text)

    config = rollout_config(tmp_path, ON_POLICY, "rollout.max_attempts=3", tasks=3)
    engine = ScriptedEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, loop=Sandboxed, run_dir=tmp_path)
    async with running(worker):
        assert await train(worker, 0) == ["g1", "g2"]
    assert plays == {0: 6, 1: 2, 2: 2}
    failed = [row for row in read_fates(tmp_path) if row["dataset_index"] == 0]
    assert [(row["fate"], row["attempts"], row["reason"]) for row in failed] == [
        ("env_error", 3, "EnvError: the sandbox died")
    ] * 2
    assert failed[0]["tokens"] > 0, "its numbers are those of the last attempt"


@pytest.mark.parametrize("how", ["agent", "timeout"])
@asynchronous
async def test_what_the_agent_itself_did_is_not_played_again(tmp_path: Path, chat_format: ChatFormat, how: str) -> None:
    plays: Counter[int] = Counter()

    class Careless(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            plays[task.index] += 1
            await policy.chat(task.messages())
            if how == "agent":
                raise RuntimeError("bug")
            await asyncio.Event().wait()
            return 1.0

    config = rollout_config(tmp_path, "rollout.episode_timeout=0.1", "rollout.max_attempts=5", tasks=2)
    engine = ScriptedEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, loop=Careless, run_dir=tmp_path)
    async with running(worker):
        with pytest.raises(RolloutEnded):
            await worker.take_batch(0)
    assert plays == {0: 2, 1: 2}
    assert [row["attempts"] for row in read_fates(tmp_path)] == [1] * 4
    assert count_fates(read_fates(tmp_path)) == {"agent_error" if how == "agent" else "timeout": 4}


@asynchronous
async def test_an_episode_waiting_for_its_next_attempt_holds_its_place_and_ends_with_the_run(
    tmp_path: Path, chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.episode._RETRY_SECONDS", 60)
    config = rollout_config(tmp_path, ON_POLICY)
    engine = ScriptedEngine(failing(member_says(chat_format), 1))
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        await until(lambda: len(engine.requests) == 4)
        await settle()
        status = await worker.status()
        assert (status.running_episodes, status.running_groups, status.queued_groups) == (1, 1, 1)
        assert "the oldest is g0.0" in worker._episode_holders()
    cancelled = next(row for row in read_fates(tmp_path) if row["episode_id"] == "g0.0")
    assert (cancelled["fate"], cancelled["attempts"], cancelled["tokens"]) == ("cancelled", 1, 0)


@asynchronous
async def test_nothing_is_kept_of_any_attempt_that_is_over(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = ScriptedEngine(failing(member_says(chat_format), 1))
    worker = build_worker(rollout_config(tmp_path, ON_POLICY, tasks=2), chat_format, engine)
    async with running(worker):
        await train(worker, 0)
    assert (worker._router._last, worker._dispatcher._plans) == ({}, {})


class Unjudged(AgentLoop):
    """Two turns, and then what its task says."""

    async def run(self, task: Task, policy: Policy) -> float:
        if task.answer == "no call":
            raise RuntimeError("bug")
        if task.answer == "no turn":
            raise ContextOverflow("too long")
        for _ in range(2):
            await policy.chat(task.messages())
        match task.answer:
            case "bug":
                raise RuntimeError("bug")
            case "hang":
                await asyncio.Event().wait()
            case "overflow":
                raise ContextOverflow("too long")
            case "engine":
                raise EngineError("gone")
            case "env":
                raise EnvError("died")
        return 0.5


UNSCORED = "rollout.unscored_reward=-1"
SCORE = (UNSCORED, *(f"rollout.on_{what}=score" for what in ("agent_error", "timeout", "truncation")))
EXCLUDE = tuple(f"rollout.on_{what}=exclude" for what in ("agent_error", "timeout", "truncation"))


async def unjudged(folder: Path, chat_format: ChatFormat, what: str, *overrides: str, split: Any = "train") -> Outcome:
    whole = says(chat_format, "4")
    answer: Answer = cut(whole, 1) if what == "cut" else whole
    config = rollout_config(folder, "rollout.episode_timeout=0.1", *overrides)
    task = Task("What is 2 + 2?", what, split=split)
    return await play_episode(config, chat_format, ScriptedEngine(lambda request: answer), Unjudged, task=task)


@pytest.mark.parametrize(
    ("what", "default", "excluded", "scored", "status"),
    [
        ("fine", 0.5, 0.5, 0.5, "completed"),
        ("cut", 0.5, Fate.TRUNCATED, 0.5, "truncated"),
        ("overflow", -1.0, Fate.TRUNCATED, -1.0, "truncated"),
        ("bug", Fate.AGENT_ERROR, Fate.AGENT_ERROR, -1.0, "aborted"),
        ("hang", Fate.TIMEOUT, Fate.TIMEOUT, -1.0, "aborted"),
        ("engine", Fate.ENGINE_ERROR, Fate.ENGINE_ERROR, Fate.ENGINE_ERROR, "aborted"),
        ("env", Fate.ENV_ERROR, Fate.ENV_ERROR, Fate.ENV_ERROR, "aborted"),
    ],
)
@asynchronous
async def test_what_the_config_says_of_episodes_that_nobody_judged(
    tmp_path: Path, chat_format: ChatFormat, what: str, default: Any, excluded: Any, scored: Any, status: str
) -> None:
    for overrides, expected in (((UNSCORED,), default), (EXCLUDE, excluded), (SCORE, scored)):
        outcome = await unjudged(tmp_path, chat_format, what, *overrides)
        found = outcome.failure if outcome.reward is None else outcome.reward.value
        assert (found, outcome.usable) == (expected, not isinstance(expected, Fate))
        assert outcome.trajectory is not None
        assert (outcome.trajectory.turns, outcome.trajectory.status) == (2, status)


@pytest.mark.parametrize(("what", "fate"), [("no call", Fate.AGENT_ERROR), ("no turn", Fate.TRUNCATED)])
@asynchronous
async def test_without_a_sampled_token_there_is_nothing_to_score(
    tmp_path: Path, chat_format: ChatFormat, what: str, fate: Fate
) -> None:
    outcome = await unjudged(tmp_path, chat_format, what, *SCORE)
    assert (outcome.failure, outcome.usable, outcome.trajectory) == (fate, False, None)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("cut", 0.5), ("overflow", Fate.TRUNCATED), ("bug", Fate.AGENT_ERROR), ("hang", Fate.TIMEOUT)],
)
@asynchronous
async def test_validation_measures_whatever_training_does_with_them(
    tmp_path: Path, chat_format: ChatFormat, what: str, expected: Any
) -> None:
    for overrides in (SCORE, EXCLUDE):
        outcome = await unjudged(tmp_path, chat_format, what, *overrides, split="val")
        assert (outcome.failure if outcome.reward is None else outcome.reward.value) == expected


@asynchronous
async def test_a_scored_failure_trains_beside_the_judged_members(tmp_path: Path, chat_format: ChatFormat) -> None:
    """The odd members' text is no number, so that their agent raises."""
    answers = [says(chat_format, "1"), says(chat_format, "one")]
    overrides = (ON_POLICY, "rollout.on_agent_error=score", "rollout.unscored_reward=-0.5")
    engine = ScriptedEngine(lambda request: answers[member_number(request) % 2])
    worker = build_worker(rollout_config(tmp_path, *overrides), chat_format, engine, loop=NumberLoop, run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        assert [[t.reward for t in group.trajectories] for group in batch.groups] == [[1.0, -0.5]] * 2
        assert batch.metrics["reward/mean"] == 0.25
        await worker.acknowledge(batch.id)
    rows = read_fates(tmp_path)
    assert {(row["fate"], row["reward"]) for row in rows if row["fate"] == "trained"} == {
        ("trained", 1.0),
        ("trained", -0.5),
    }


@asynchronous
async def test_an_excluded_cut_answer_leaves_its_group(tmp_path: Path, chat_format: ChatFormat) -> None:
    whole = [says(chat_format, text) for text in ("1", "0", "1")]
    overrides = (ON_POLICY, "rollout.on_truncation=exclude", "rollout.n=3", "actor.ppo_mini_batch_size=1")

    def script(request: GenerateRequest) -> Answer:
        member = member_number(request)
        return cut(whole[2], 1) if member == 2 else whole[member]

    worker = build_worker(rollout_config(tmp_path, *overrides), chat_format, ScriptedEngine(script), run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        assert [t.episode_id for t in batch.trajectories] == ["g0.0", "g0.1"]
        assert batch.metrics["episode/failed"] == 1
        await worker.acknowledge(batch.id)
    fates = {row["episode_id"]: (row["fate"], row["reason"]) for row in read_fates(tmp_path)}
    assert fates["g0.2"] == ("truncated", "a token limit cut it")


@asynchronous
async def test_a_held_engine_is_not_an_error(tmp_path: Path, chat_format: ChatFormat) -> None:
    """A time-out inside a turn: what was sampled of that turn is not there, the turns before it are."""

    class Two(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            await policy.chat(task.messages())
            engine.before_token = held
            await policy.chat(task.messages())
            return 1.0

    engine = HeldEngine(turns(chat_format, "4"))
    held, engine.before_token = engine.before_token, None
    config = rollout_config(tmp_path, "rollout.episode_timeout=0.2", "rollout.on_timeout=score")
    outcome = await play_episode(config, chat_format, engine, Two, task=Task("x"))
    assert outcome.usable and outcome.trajectory is not None and outcome.trajectory.turns == 1
