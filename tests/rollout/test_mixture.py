"""Several environments trained together: their shares, their own numbers, and what a sampler is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import AgentLoop, EnvError, Policy, Sampler, Task
from agentrl.config import RunConfig, load_config
from agentrl.record import RolloutEnded
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous
from tests.support.rollout import build_worker, member_says, read_fates, rollout_config, running, train, write_tasks
from tests.support.scripted import ScriptedEngine, turns


class Observer(Sampler):
    """Keeps what it is told."""

    told: list[tuple[str, int, list[float]]] = []  # noqa: RUF012  one for all samplers of a run

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        self.told.append((task.environment, task.index, sorted(rewards)))


def mixed_config(folder: Path, *overrides: str, **environments: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "environments": {
            name: {"train": str(write_tasks(folder / f"{name}.jsonl", 12)), "agent": {"loop": "x:Loop"}, **own}
            for name, own in environments.items()
        },
        "data": {"shuffle": False},
        "rollout": {"n": 2, "max_concurrent": 64, "max_head_offpolicyness": 0},
        "actor": {"ppo_mini_batch_size": 4},
        "trainer": {"total_epochs": 1},
    }
    return load_config(values, list(overrides))


class ByEnvironment(AgentLoop):
    """In `games` rewards are ten times those of `sums`."""

    async def run(self, task: Task, policy: Policy) -> float:
        reply = await policy.chat(task.messages())
        return float(reply.text) * (10 if task.environment == "games" else 1)


@asynchronous
async def test_groups_come_by_weight_and_each_environment_has_its_own_numbers(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    config = mixed_config(tmp_path, sums={"weight": 3.0}, games={})
    engine = ScriptedEngine(member_says(chat_format))
    worker = build_worker(config, chat_format, engine, loop=ByEnvironment, run_dir=tmp_path)
    async with running(worker):
        batch = await worker.take_batch(0)
        names = Counter(t.environment for t in batch.trajectories)
        assert names == {"sums": 6, "games": 2}
        metrics = batch.metrics
        assert (metrics["environment/sums/reward"], metrics["environment/games/reward"]) == (0.5, 5.0)
        assert (metrics["environment/sums/share"], metrics["environment/games/share"]) == (0.75, 0.25)
        await worker.acknowledge(batch.id)
    rows = read_fates(tmp_path)
    trained = {(row["environment"], row["dataset_index"]) for row in rows if row["fate"] == "trained"}
    assert trained == {("sums", 0), ("sums", 1), ("sums", 2), ("games", 12)}


@asynchronous
async def test_a_single_environment_has_no_numbers_of_its_own(tmp_path: Path, chat_format: ChatFormat) -> None:
    worker = build_worker(rollout_config(tmp_path), chat_format, ScriptedEngine(member_says(chat_format)))
    async with running(worker):
        metrics = (await worker.take_batch(0)).metrics
    assert not [name for name in metrics if name.startswith("environment/")]


@asynchronous
async def test_an_environment_that_is_used_up_leaves_the_run_to_the_other(
    tmp_path: Path, chat_format: ChatFormat
) -> None:
    own = {"train": str(write_tasks(tmp_path / "few.jsonl", 2))}
    config = mixed_config(tmp_path, sums={}, games=own)
    worker = build_worker(config, chat_format, ScriptedEngine(member_says(chat_format)), run_dir=tmp_path)
    async with running(worker):
        version = 0
        while True:
            try:
                await train(worker, version)
            except RolloutEnded:
                break
            version += 1
    ends = Counter((row["environment"], row["dataset_index"]) for row in read_fates(tmp_path))
    assert set(ends.values()) == {2}
    assert Counter(name for name, _ in ends) == {"sums": 12, "games": 2}


@asynchronous
async def test_each_environment_is_validated_by_itself(tmp_path: Path, chat_format: ChatFormat) -> None:
    class Solves(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            await policy.chat(task.messages())
            if task.environment == "games" and task.index == 3:
                raise EnvError("died")
            return float(task.environment == "games" or task.index == 0)

    val = {name: {"val": str(write_tasks(tmp_path / f"{name}-val.jsonl", 3))} for name in ("sums", "games")}
    config = mixed_config(tmp_path, **val)
    worker = build_worker(config, chat_format, ScriptedEngine(turns(chat_format, "1")), loop=Solves)
    report = await worker.validate()
    assert report.accuracies == {"sums": 1 / 3, "games": 1.0}
    assert (report.episodes, report.failed, report.accuracy) == (5, 1, 3 / 5)


@asynchronous
async def test_a_sampler_is_told_how_every_group_ended(tmp_path: Path, chat_format: ChatFormat) -> None:
    class Sometimes(AgentLoop):
        async def run(self, task: Task, policy: Policy) -> float:
            reply = await policy.chat(task.messages())
            if task.index == 1 and reply.text == "0":
                raise RuntimeError("bug")
            if task.index == 2:
                raise EnvError("died")
            return 1.0 if task.index == 3 else float(reply.text)

    Observer.told.clear()
    config = rollout_config(tmp_path, f"data.sampler={__name__}:Observer", tasks=5)
    worker = build_worker(config, chat_format, ScriptedEngine(member_says(chat_format)), loop=Sometimes)
    async with running(worker):
        await train(worker, 0)
    assert sorted(Observer.told) == [
        ("default", 0, [0.0, 1.0]),  # trained
        ("default", 1, [1.0]),  # incomplete: the failed member is no judgement
        ("default", 2, []),
        ("default", 3, [1.0, 1.0]),  # filtered
        ("default", 4, [0.0, 1.0]),
    ]
