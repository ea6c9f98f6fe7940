"""ReMax: one more episode of each task is played greedily; what it earns is the baseline of the others."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from agentrl.record import EngineError, RolloutEnded
from agentrl.record.protocols import GenerateRequest, GenerateResult
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.rollout import (
    StragglingEngine,
    build_worker,
    count_fates,
    member_says,
    publish,
    read_fates,
    rollout_config,
    running,
)
from tests.support.scripted import Script, ScriptedEngine, says

REMAX = "algorithm.adv_estimator=remax"
GREEDY = "greedy, the baseline of its group"


def answers(chat_format: ChatFormat) -> Script:
    """Greedy episodes say 0.5, the others 1 and 0."""
    members, greedy = member_says(chat_format), says(chat_format, "0.5")
    return lambda request: greedy if ".greedy" in request.request_id else members(request)


class Watching(ScriptedEngine):
    """Notes at which temperature each request was sampled; requests of greedy episodes may fail."""

    def __init__(self, script: Any, fails: bool = False) -> None:
        super().__init__(script)
        self.temperatures: dict[str, float] = {}
        self._fails = fails

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.temperatures[request.request_id] = request.temperature
        if self._fails and "greedy" in request.request_id:
            raise EngineError("out of memory")
        return await super().generate(request)


@asynchronous
async def test_the_greedy_episode_is_played_counted_and_not_trained(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = Watching(answers(chat_format))
    worker = build_worker(rollout_config(tmp_path, REMAX), chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        await worker.acknowledge(batch.id)
        status = await worker.status()
        assert status.dispatched == sum(status.fates.values()) + status.in_flight
    for group in batch.groups:
        assert [t.episode_id for t in group.trajectories] == [f"{group.id}.0", f"{group.id}.1"]
        assert group.greedy is not None and group.greedy.reward == 0.5
    assert batch.metrics["episode/count"] == 4
    rows = [row for row in read_fates(tmp_path) if row["episode_id"].endswith(".greedy")]
    assert {(row["fate"], row["reason"]) for row in rows if row["fate"] != "cancelled"} == {("filtered", GREEDY)}
    greedy = {name: t for name, t in engine.temperatures.items() if ".greedy" in name}
    assert greedy and set(greedy.values()) == {0.0}
    assert {t for name, t in engine.temperatures.items() if name not in greedy} == {1.0}


@asynchronous
async def test_a_group_that_is_played_again_keeps_its_baseline(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = StragglingEngine(answers(chat_format))
    keys = (REMAX, "async_training.on_stale=requeue", "rollout.max_head_offpolicyness=1", "rollout.max_attempts=3")
    worker = build_worker(rollout_config(tmp_path, *keys, tasks=6), chat_format, engine, run_dir=tmp_path)
    baselines: dict[str, float] = {}
    async with running(worker):
        for version in count():
            if version == 2:
                assert "g0" not in baselines
                engine.let_go()
                engine.before_token = None
            try:
                batch = await worker.take_batch(version)
            except RolloutEnded:
                break
            baselines |= {group.id: group.greedy.reward for group in batch.groups if group.greedy is not None}
            await worker.acknowledge(batch.id)
            await publish(worker, version + 1)
    assert baselines == {f"g{number}": 0.5 for number in range(6)}
    attempts = {row["episode_id"]: row["attempts"] for row in read_fates(tmp_path)}
    assert (attempts["g0.0"], attempts["g0.1"], attempts["g0.greedy"]) == (2, 2, 1)


@asynchronous
async def test_without_a_baseline_a_group_is_not_trained(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = Watching(answers(chat_format), fails=True)
    config = rollout_config(tmp_path, REMAX, "rollout.max_attempts=1")
    worker = build_worker(config, chat_format, engine, run_dir=tmp_path)
    async with running(worker):
        await until(lambda: count_fates(read_fates(tmp_path)).get("group_incomplete", 0) >= 4)
    fates = {row["episode_id"].split(".")[1]: row["fate"] for row in read_fates(tmp_path) if row["fate"] != "cancelled"}
    assert fates == {"0": "group_incomplete", "1": "group_incomplete", "greedy": "engine_error"}


@asynchronous
async def test_the_greedy_episode_needs_a_place_of_its_own(tmp_path: Path, chat_format: ChatFormat) -> None:
    engine = ScriptedEngine(answers(chat_format))
    worker = build_worker(rollout_config(tmp_path, REMAX, "rollout.max_concurrent=5"), chat_format, engine)
    async with running(worker):
        await worker.take_batch(0)
        assert (await worker.status()).running_episodes <= 5
