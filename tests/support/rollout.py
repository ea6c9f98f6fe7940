"""A rollout side of real parts around a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl import AgentLoop, Env, Policy, Task
from agentrl.config import RunConfig, load_config
from agentrl.record.protocols import Bucket, GenerateRequest, RolloutStatus
from agentrl.rollout import EpisodeRunner, Outcome, Plugins, RolloutWorker
from agentrl.session import ChatFormat, Door
from tests.support.scripted import Sampled, Script, ScriptedEngine, member_number, says

BUCKET = Bucket(0, "nowhere", 0, 0, ())
TASK = Task([{"role": "user", "content": "What is 2 + 2?"}], "4", id="t3", index=3, epoch=1)


def write_tasks(path: Path, count: int, **extra: Any) -> Path:
    """A JSONL file of `count` tasks, each different."""
    path.write_text(
        "".join(json.dumps({"prompt": f"task {i}", "answer": str(i), **extra}) + "\n" for i in range(count))
    )
    return path


def rollout_config(folder: Path, *overrides: str, tasks: int = 8) -> RunConfig:
    """Two episodes a task, two groups a step, one epoch in order; `overrides` have the last word."""
    in_order = {} if any(key.startswith("data.sampler=") for key in overrides) else {"shuffle": False}
    defaults: dict[str, Any] = {
        "data": {"train": str(write_tasks(folder / "train.jsonl", tasks)), **in_order},
        "rollout": {"n": 2, "max_concurrent": 64},
        "actor": {"ppo_mini_batch_size": 2},
        "trainer": {"total_epochs": 1},
    }
    return load_config(defaults, list(overrides))


def member_says(chat_format: ChatFormat) -> Script:
    """Members 0, 2, ... of a group say 1, the others 0: no group is without variance."""
    answers = [says(chat_format, "1"), says(chat_format, "0")]
    return lambda request: answers[member_number(request) % 2]


class NumberLoop(AgentLoop):
    """One turn; the reward is the number said."""

    async def run(self, task: Task, policy: Policy) -> float:
        reply = await policy.chat(task.messages())
        return float(reply.text)


class HeldEngine(ScriptedEngine):
    """Samples token after token only while it is not held; holds each request at the token asked for."""

    def __init__(self, script: Script, *, hold_at: int = 0, version: int = 0) -> None:
        super().__init__(script, version=version)
        self.hold_at = hold_at
        self.held: dict[str, asyncio.Event] = {}
        self.before_token = self._hold

    async def _hold(self, request: Any, position: int) -> None:
        if position == self.hold_at:
            self.held[request.request_id] = event = asyncio.Event()
            await event.wait()

    def let_go(self, prefix: str = "") -> None:
        """Lets the held requests whose id begins with `prefix` go on."""
        for request_id, event in self.held.items():
            if request_id.startswith(prefix):
                event.set()


class StragglingEngine(HeldEngine):
    """Holds only the requests whose ids begin with `prefix`, at their second token; the others go on by themselves."""

    def __init__(self, script: Script, *, prefix: str = "g0.") -> None:
        super().__init__(script, hold_at=1)
        self._prefix = prefix

    async def _hold(self, request: Any, position: int) -> None:
        if request.request_id.startswith(self._prefix):
            await super()._hold(request, position)


def attempt_number(request: GenerateRequest) -> int:
    """Which time its episode is played, from 1."""
    return int(request.request_id.rpartition(":")[0].partition("~")[2] or 1)


async def play_episode(
    config: RunConfig,
    chat_format: ChatFormat,
    engine: ScriptedEngine,
    loop: type[AgentLoop],
    *,
    env: type[Env] | None = None,
    task: Task,
    door: Door | None = None,
) -> Outcome:
    """Plays one episode, outside any gate."""
    plugins = Plugins(loop, env, config.agent.args, config.env.args)
    runner = EpisodeRunner(config, {"default": plugins}, chat_format, engine, door=door)
    return await runner.play(task, group_id="g0", episode_id="g0.1", version=0)


def build_worker(
    config: RunConfig,
    chat_format: ChatFormat,
    engines: ScriptedEngine | Mapping[str, ScriptedEngine],
    *,
    loop: type[AgentLoop] = NumberLoop,
    env: type[Env] | None = None,
    run_dir: Path | None = None,
) -> RolloutWorker:
    named = {"engine-0": engines} if isinstance(engines, ScriptedEngine) else engines
    plugins = {
        name: Plugins(loop, env, environment.agent.args, environment.env.args)
        for name, environment in config.mixture.items()
    }
    return RolloutWorker(config, chat_format=chat_format, plugins=plugins, engines=named, run_dir=run_dir)


@contextlib.asynccontextmanager
async def running(worker: RolloutWorker) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a worker and its gateway for the duration of a block; its books are checked all the time, and closed at the
    end."""
    serving = asyncio.create_task(worker.gateway.run())
    run = asyncio.create_task(worker.run())
    audit = asyncio.create_task(_audit(worker))
    try:
        yield run
        assert not audit.done(), audit.exception()
    finally:
        await worker.stop()
        await asyncio.wait([run])
        for task in (audit, serving):
            task.cancel()
        await asyncio.wait([audit, serving])
    status = await worker.status()
    assert_books(status)
    assert (status.in_flight, status.running_episodes, status.running_groups, status.queued_groups) == (0, 0, 0, 0)


async def _audit(worker: RolloutWorker) -> None:
    while True:
        assert_books(await worker.status())
        await asyncio.sleep(0)


def assert_books(status: RolloutStatus) -> None:
    """Every dispatched episode has one fate or is in flight."""
    assert status.dispatched == sum(status.fates.values()) + status.in_flight, status


async def publish(worker: RolloutWorker, version: int) -> None:
    """New weights, from begin to finish."""
    await worker.begin_publish()
    await worker.publish_bucket(BUCKET)
    await worker.finish_publish(version)


async def train(worker: RolloutWorker, version: int) -> list[str]:
    """One training step and its publication; returns the ids of the groups trained."""
    batch = await worker.take_batch(version)
    await worker.acknowledge(batch.id)
    await publish(worker, version + 1)
    return [group.id for group in batch.groups]


def read_fates(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "fates.jsonl").read_text().splitlines()]


def count_fates(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    assert len({row["episode_id"] for row in rows}) == len(rows), "an episode has two fates"
    return dict(Counter(str(row["fate"]) for row in rows))


def cut(sampled: Sampled, tokens: int) -> Sampled:
    """The same turn, broken off by the token limit."""
    return Sampled(list(sampled.token_ids)[:tokens], "length")
