"""Agents that reach the model over HTTP: how their episodes end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl import AgentLoop, Policy, Reward, Task
from agentrl.gateway import Gateway, GatewayAddress
from agentrl.record import EngineError, Fate
from agentrl.rollout import Outcome
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, settle, until
from tests.support.gateway import served
from tests.support.rollout import (
    BUCKET,
    TASK,
    HeldEngine,
    build_worker,
    member_says,
    play_episode,
    rollout_config,
    running,
)
from tests.support.scripted import Script, ScriptedEngine, says, turns

Play = Callable[..., Any]


@pytest.fixture
def play(tmp_path: Path, chat_format: ChatFormat) -> Play:
    """Plays one episode of a loop against a script, with a gateway."""

    async def run(loop: type[AgentLoop], script: Script | None = None, *overrides: str) -> Outcome:
        engine = ScriptedEngine(script or turns(chat_format, "4"))
        async with served(Gateway(GatewayAddress(), model="policy")) as gateway:
            config = rollout_config(tmp_path, *overrides)
            return await play_episode(config, chat_format, engine, loop, task=TASK, door=gateway)

    return run


class HttpSolver(AgentLoop):
    """Asks over HTTP, and raises what a client raises."""

    async def run(self, task: Task, policy: Policy) -> Any:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {policy.api_key}"}) as client:
            return await self.play(client, policy, {"model": policy.model, "messages": task.messages()})

    async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
        response = await client.post(f"{policy.base_url}/chat/completions", json=body)
        response.raise_for_status()
        return float(response.json()["choices"][0]["message"]["content"])


class PlainHttpSolver(AgentLoop):
    """The same as a plain function."""

    def run(self, task: Task, policy: Any) -> float:
        headers = {"Authorization": f"Bearer {policy.api_key}"}
        body = {"model": policy.model, "messages": task.messages()}
        response = httpx.post(f"{policy.base_url}/chat/completions", json=body, headers=headers)
        return float(response.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("loop", [HttpSolver, PlainHttpSolver])
@asynchronous
async def test_an_episode_over_http_is_recorded_like_any_other(
    play: Play, chat_format: ChatFormat, loop: type[AgentLoop]
) -> None:
    outcome = await play(loop)
    assert (outcome.failure, outcome.reason, outcome.reward) == (None, "", Reward(4.0))
    assert outcome.trajectory.sampled_tokens == len(says(chat_format, "4").token_ids)


@pytest.mark.parametrize("loop", [HttpSolver, PlainHttpSolver])
@asynchronous
async def test_what_the_client_raises_is_what_really_happened(play: Play, loop: type[AgentLoop]) -> None:
    outcome = await play(loop, lambda request: EngineError("gone"))
    assert (outcome.failure, outcome.reason) == (Fate.ENGINE_ERROR, "EngineError: gone")
    outcome = await play(loop, None, "data.max_prompt_length=1", "rollout.on_truncation=exclude")
    assert outcome.failure is Fate.TRUNCATED
    assert "data.max_prompt_length" in outcome.reason


@asynchronous
async def test_what_the_agent_does_wrong_is_its_own_error(play: Play) -> None:
    class Wrong(HttpSolver):
        async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
            return await super().play(client, policy, {**body, "n": 0})

    outcome = await play(Wrong)
    assert outcome.failure is Fate.AGENT_ERROR
    assert "400 Bad Request" in outcome.reason


@asynchronous
async def test_an_agent_that_went_on_after_a_failure_answers_for_what_comes_later(play: Play) -> None:
    class Careless(HttpSolver):
        async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
            response = await client.post(
                f"{policy.base_url}/chat/completions", json={**body, "messages": [*[body["messages"][0]] * 90]}
            )
            assert response.status_code == 400
            await super().play(client, policy, body)
            raise KeyError("a bug")

    outcome = await play(Careless, None, "data.max_prompt_length=100")
    assert (outcome.failure, outcome.reason) == (Fate.AGENT_ERROR, "KeyError: 'a bug'")


@asynchronous
async def test_an_agent_that_never_called_is_told_where(play: Play) -> None:
    """Case 38."""

    class Elsewhere(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            assert policy.base_url
            assert policy.api_key
            return 0.0

    outcome = await play(Elsewhere)
    assert outcome.failure is Fate.AGENT_ERROR
    assert "without any model call: it should have asked the model at http://127.0.0.1:" in outcome.reason


@asynchronous
async def test_the_reward_may_come_over_http(play: Play) -> None:
    class Judged(HttpSolver):
        async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
            await super().play(client, policy, body)
            url = f"{policy.base_url.removesuffix('/v1')}/agentrl/reward"
            for given in ({"reward": 0.0}, {"reward": 0.25, "parts": {"style": 1}}):
                (await client.post(url, json=given)).raise_for_status()

    assert (await play(Judged)).reward == Reward(0.25, {"style": 1.0})


@asynchronous
async def test_an_episode_without_any_reward_is_an_error(play: Play) -> None:
    class Unjudged(HttpSolver):
        async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
            await super().play(client, policy, body)

    outcome = await play(Unjudged)
    assert outcome.failure is Fate.AGENT_ERROR
    assert "the reward must be a number" in outcome.reason


@asynchronous
async def test_an_episode_of_nothing_but_guided_turns_is_not_trained(play: Play) -> None:
    class Guided(HttpSolver):
        async def play(self, client: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> Any:
            return await super().play(client, policy, {**body, "response_format": {"type": "json_object"}})

    outcome = await play(Guided)
    assert (outcome.failure, outcome.usable) == (Fate.FILTERED, False)
    assert "sampled under a grammar" in outcome.reason


@asynchronous
async def test_callers_wait_while_weights_are_updated(tmp_path: Path, chat_format: ChatFormat) -> None:
    """They see neither an abort nor an error, and each token has the version it was sampled under."""
    engine = HeldEngine(member_says(chat_format), hold_at=1)
    worker = build_worker(rollout_config(tmp_path), chat_format, engine, loop=HttpSolver)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        await worker.begin_publish()
        engine.let_go()
        await settle()
        assert (await worker.status()).running_episodes == 8, "all wait"
        await worker.publish_bucket(BUCKET)
        await worker.finish_publish(1)
        batch = await worker.take_batch(1)
        versions = [branch.trained_versions.tolist() for t in batch.trajectories for branch in t.branches]
        assert len(versions) == 4
        assert all(each == [0] + [1] * (len(each) - 1) for each in versions)
        assert (await worker.status()).fates == {}
