"""`agentrl serve`: episodes that agents from outside open, play and end. They pass the gate like all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl import OutsideAgent
from agentrl.rollout import RolloutWorker
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.rollout import (
    HeldEngine,
    build_worker,
    count_fates,
    member_says,
    publish,
    read_fates,
    rollout_config,
    running,
)
from tests.support.scripted import ScriptedEngine

SERVE = "agent.loop=agentrl:OutsideAgent"


class Outside:
    """A machine on which agents run.

    Attributes:
        worker: the rollout side that gives it episodes.
        http: a client.
    """

    def __init__(self, worker: RolloutWorker, http: httpx.AsyncClient, folder: Path) -> None:
        self.worker = worker
        self.http = http
        self.folder = folder

    async def open(self) -> dict[str, Any]:
        """An episode; waits for one."""
        while True:
            response = await self.http.post("/agentrl/episodes")
            if response.status_code == 201:
                return response.json()
            assert response.status_code == 429, response.text
            await asyncio.sleep(0.01)

    async def ask(self, episode: dict[str, Any], path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        given = body or {
            "model": episode["model"],
            "messages": [{"role": "user", "content": episode["task"]["prompt"]}],
        }
        return await self.http.post(path, json=given, headers={"Authorization": f"Bearer {episode['api_key']}"})

    async def play(self, episode: dict[str, Any]) -> float:
        """One turn, and its number as the reward."""
        response = await self.ask(episode)
        reward = float(response.raise_for_status().json()["choices"][0]["message"]["content"])
        (await self.ask(episode, "/agentrl/reward", reward=reward)).raise_for_status()
        return reward

    async def fate(self, episode: dict[str, Any]) -> dict[str, Any]:
        """The line about an episode in `fates.jsonl`; waits for it."""

        def row() -> dict[str, Any] | None:
            return next((r for r in read_fates(self.folder) if r["episode_id"] == episode["episode_id"]), None)

        await until(lambda: row() is not None)
        found = row()
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def outside(
    folder: Path, chat_format: ChatFormat, *overrides: str, engine: ScriptedEngine | None = None, tasks: int = 8
) -> AsyncIterator[Outside]:
    config = rollout_config(folder, SERVE, *overrides, tasks=tasks)
    engine = engine or ScriptedEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, loop=OutsideAgent, run_dir=folder)
    async with running(worker), httpx.AsyncClient(base_url=(await worker.status()).gateway, timeout=15) as http:
        yield Outside(worker, http, folder)


@asynchronous
async def test_episodes_from_outside_make_batches(tmp_path: Path, chat_format: ChatFormat) -> None:
    async with outside(tmp_path, chat_format) as there:
        opened = [await there.open() for _ in range(4)]
        assert [episode["task"]["prompt"] for episode in opened] == ["task 0", "task 0", "task 1", "task 1"]
        assert opened[0]["task"]["answer"] == "0"
        assert [await there.play(episode) for episode in opened] == [1, 0, 1, 0]
        batch = await there.worker.take_batch(0)
        await there.worker.acknowledge(batch.id)
        assert sorted(t.episode_id for t in batch.trajectories) == sorted(e["episode_id"] for e in opened)
        assert (await there.ask(opened[0])).status_code == 401, "its key died with it"
    assert count_fates(read_fates(tmp_path))["trained"] == 4


@asynchronous
async def test_there_is_no_episode_where_the_gate_admits_none(tmp_path: Path, chat_format: ChatFormat) -> None:
    """Case 23."""
    async with outside(tmp_path, chat_format, "rollout.max_head_offpolicyness=0") as there:
        opened = [await there.open() for _ in range(4)]
        response = await there.http.post("/agentrl/episodes")
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert "staleness gate" in response.json()["error"]["message"]
        for episode in opened:
            await there.play(episode)
        batch = await there.worker.take_batch(0)
        await there.worker.acknowledge(batch.id)
        assert (await there.http.post("/agentrl/episodes")).status_code == 429, "until new weights are there"
        await publish(there.worker, 1)
        assert (await there.open())["task"]["prompt"] == "task 2"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("gateway.idle_timeout=0.3", "no request for gateway.idle_timeout = 0.3 s"),
        ("rollout.episode_timeout=0.3", "ran longer than rollout.episode_timeout = 0.3 s"),
    ],
)
@asynchronous
async def test_an_agent_that_falls_silent_loses_its_episode(
    tmp_path: Path, chat_format: ChatFormat, override: str, reason: str
) -> None:
    async with outside(tmp_path, chat_format, override, tasks=2) as there:
        silent, *others = [await there.open() for _ in range(4)]
        await there.ask(silent)
        for episode in others:
            await there.play(episode)
        row = await there.fate(silent)
        assert row["fate"] == "timeout"
        assert reason in row["reason"]
        assert (await there.ask(silent)).status_code == 401


@asynchronous
async def test_an_episode_is_not_idle_while_its_request_is_answered(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = HeldEngine(member_says(chat_format))
    async with outside(tmp_path, chat_format, "gateway.idle_timeout=0.2", engine=engine) as there:
        episode = await there.open()
        asking = asyncio.ensure_future(there.ask(episode))
        await asyncio.sleep(0.6)
        engine.let_go()
        assert (await asking).status_code == 200


@asynchronous
async def test_episodes_that_nobody_has_asked_for_wait(tmp_path: Path, chat_format: ChatFormat) -> None:
    limits = ("gateway.idle_timeout=0.1", "rollout.episode_timeout=0.1")
    async with outside(tmp_path, chat_format, *limits) as there:
        await asyncio.sleep(0.4)
        assert (await there.worker.status()).fates == {}
        assert (await there.open())["task"]["prompt"] == "task 0"


@pytest.mark.parametrize(
    ("said", "fate"),
    [
        ({"error": "my code broke"}, "agent_error"),
        ({"error": "the database is down", "fate": "env_error"}, "env_error"),
    ],
)
@asynchronous
async def test_an_agent_may_say_why_there_is_no_reward(
    tmp_path: Path, chat_format: ChatFormat, said: dict[str, str], fate: str
) -> None:
    async with outside(tmp_path, chat_format, "rollout.max_attempts=1", tasks=2) as there:
        episode = await there.open()
        await there.ask(episode)
        told = {**said, "error": f"{said['error']} (my key is {episode['api_key']})"}
        assert (await there.ask(episode, "/agentrl/episodes/end", **told)).status_code == 200
        await there.play(await there.open())
        row = await there.fate(episode)
        assert row["fate"] == fate
        assert f"{said['error']} (my key is (its key))" in row["reason"]


@asynchronous
async def test_what_the_environment_spoiled_is_handed_out_again(tmp_path: Path, chat_format: ChatFormat) -> None:
    async with outside(tmp_path, chat_format, tasks=1) as there:
        first, other = [await there.open() for _ in range(2)]
        await there.ask(first)
        await there.ask(first, "/agentrl/episodes/end", error="it died", fate="env_error")
        again = await there.open()
        assert again["episode_id"] == first["episode_id"]
        assert again["api_key"] != first["api_key"]
        await there.play(again)
        await there.play(other)
        batch = await there.worker.take_batch(0)
        await there.worker.acknowledge(batch.id)
    assert [row["attempts"] for row in read_fates(tmp_path) if row["episode_id"] == first["episode_id"]] == [2]


@asynchronous
async def test_a_reward_without_any_call_is_no_result(tmp_path: Path, chat_format: ChatFormat) -> None:
    """Case 38."""
    async with outside(tmp_path, chat_format, tasks=2) as there:
        episode = await there.open()
        await there.ask(episode, "/agentrl/reward", reward=0)
        await there.play(await there.open())
        row = await there.fate(episode)
        assert row["fate"] == "agent_error"
        assert f"it should have asked the model at {episode['base_url']}" in row["reason"]


@asynchronous
async def test_opening_takes_the_key_of_the_gateway(
    tmp_path: Path, chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_GATEWAY_KEY", "secret")
    async with outside(tmp_path, chat_format) as there:
        for key in ("", "Bearer wrong", "Bearer \xe4"):
            headers = [(b"Authorization", key.encode("latin-1"))]
            assert (await there.http.post("/agentrl/episodes", headers=headers)).status_code == 401
        response = await there.http.post("/agentrl/episodes", headers={"x-api-key": "secret"})
        assert response.status_code == 201


@asynchronous
async def test_a_run_that_plays_its_own_episodes_gives_none_away(tmp_path: Path, chat_format: ChatFormat) -> None:
    from tests.rollout.test_http_agents import HttpSolver

    worker = build_worker(rollout_config(tmp_path), chat_format, HeldEngine(member_says(chat_format)), loop=HttpSolver)
    async with running(worker), httpx.AsyncClient() as http:
        assert (await worker.status()).gateway == ""
        response = await http.post(f"{worker.gateway.url}/agentrl/episodes")
        assert response.status_code == 404
        assert "agentrl serve" in response.json()["error"]["message"]
