"""Held-out tasks: what counts in the means, and that training is not disturbed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl import AgentLoop, EnvError, Policy, Reward, Task
from agentrl.record import EngineError, load
from agentrl.record.protocols import ValidationReport
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.rollout import HeldEngine, build_worker, member_says, publish, rollout_config, running, write_tasks
from tests.support.scripted import ScriptedEngine, says, turns


class Judged(AgentLoop):
    """What becomes of an episode depends on its task."""

    async def run(self, task: Task, policy: Policy) -> Any:
        reply = await policy.chat(task.messages())
        match task.index:
            case 0:
                return Reward(0.25, parts={"accuracy": 1.0})
            case 1:
                return 1.0
            case 2:
                return Reward(2.0, parts={"accuracy": 0.0})
            case 3:
                raise RuntimeError("bug")
            case 4:
                raise EnvError("the verifier crashed")
            case 5:
                raise EngineError("gone")
            case _:
                return float(reply.text)


async def validate(folder: Path, chat_format: ChatFormat, *overrides: str, count: int = 6) -> ValidationReport:
    config = rollout_config(folder, f"data.val={write_tasks(folder / 'val.jsonl', count)}", *overrides)
    worker = build_worker(config, chat_format, ScriptedEngine(turns(chat_format, "1")), loop=Judged, run_dir=folder)
    return await worker.validate()


@asynchronous
async def test_infrastructure_failures_are_in_no_mean_and_agent_errors_count_as_zero(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    report = await validate(tmp_path, chat_format)
    assert (report.episodes, report.failed) == (4, 2)
    assert report.accuracy == pytest.approx(2 / 4)
    assert report.reward == pytest.approx((0.25 + 1.0 + 2.0 + 0.0) / 4)
    assert (report.version_first, report.version_last) == (0, 0)


@asynchronous
async def test_each_task_is_played_as_often_as_asked(tmp_path: Path, chat_format: ChatFormat) -> None:
    report = await validate(tmp_path, chat_format, "val.n=3", "val.limit=2")
    assert (report.episodes, report.failed, report.accuracy) == (6, 0, 1.0)
    assert len({t.episode_id for t in load(tmp_path / "trajectories")}) == 6


@asynchronous
async def test_when_nothing_could_be_judged_the_report_says_so(tmp_path: Path, chat_format: ChatFormat) -> None:
    config = rollout_config(tmp_path, f"data.val={write_tasks(tmp_path / 'val.jsonl', 3)}")
    worker = build_worker(config, chat_format, ScriptedEngine(lambda request: EngineError("gone")))
    report = await worker.validate()
    assert (report.episodes, report.failed) == (0, 3)
    assert math.isnan(report.accuracy) and math.isnan(report.reward)


@asynchronous
async def test_validation_is_outside_the_gate_and_publications_go_on_meanwhile(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    config = rollout_config(tmp_path, f"data.val={write_tasks(tmp_path / 'val.jsonl', 3)}")
    training, one = member_says(chat_format), says(chat_format, "1")
    engine = HeldEngine(lambda request: one if request.request_id.startswith("v") else training(request), hold_at=1)
    worker = build_worker(config, chat_format, engine)
    async with running(worker):
        await until(lambda: len(engine.held) == 8)
        validation = asyncio.ensure_future(worker.validate())
        await until(lambda: len(engine.held) == 11)
        status = await worker.status()
        assert (status.running_episodes, status.dispatched) == (8, 8)
        await publish(worker, 1)
        engine.let_go("v")
        report = await validation
        assert (report.version_first, report.version_last, report.accuracy) == (0, 1, 1.0)
        engine.let_go()
        await until(lambda: engine.running == 0)
        assert (await worker.status()).dispatched == 8


@asynchronous
async def test_no_more_episodes_are_played_at_once_than_may(tmp_path: Path, chat_format: ChatFormat) -> None:
    path = write_tasks(tmp_path / "val.jsonl", 7)
    config = rollout_config(tmp_path, f"data.val={path}", "rollout.max_concurrent=3")
    engine = HeldEngine(turns(chat_format, "1"))
    most = 0
    worker = build_worker(config, chat_format, engine)
    validation = asyncio.ensure_future(worker.validate())
    while not validation.done():
        await asyncio.sleep(0)
        most = max(most, engine.running)
        if engine.running == 3 or len(engine.held) == 7:
            engine.let_go()
    assert (most, (await validation).episodes) == (3, 7)


@asynchronous
async def test_without_held_out_tasks_nothing_is_played(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = ScriptedEngine(turns(chat_format, "1"))
    report = await build_worker(rollout_config(tmp_path), chat_format, engine).validate()
    assert (report.episodes, engine.requests) == (0, [])


class OverHttp(AgentLoop):
    """Asks through the gateway, as agents of other frameworks do."""

    async def run(self, task: Task, policy: Policy) -> float:
        body = {"model": policy.model, "messages": task.messages()}
        headers = {"Authorization": f"Bearer {policy.api_key}"}
        async with httpx.AsyncClient(base_url=policy.base_url, headers=headers) as http:
            response = await http.post("/chat/completions", json=body)
        return float(response.raise_for_status().json()["choices"][0]["message"]["content"])


@asynchronous
async def test_agents_reach_the_gateway_when_the_training_episodes_have_ended(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    config = rollout_config(tmp_path, f"data.val={write_tasks(tmp_path / 'val.jsonl', 4)}")
    worker = build_worker(config, chat_format, ScriptedEngine(turns(chat_format, "1")), loop=OverHttp)
    async with running(worker) as run:
        await worker.stop()
        await asyncio.wait([run])
        report = await worker.validate()
    assert (report.episodes, report.accuracy) == (4, 1.0)
