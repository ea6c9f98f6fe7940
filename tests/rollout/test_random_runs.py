"""Whole runs under an adversary: the real rollout side and the real training loop around scripted engines.

Chance decides who goes on next: a token, an agent, the trainer, a publication, an engine that dies and comes back. No
time passes; what has to hold does so whatever the order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import AgentLoop, EnvError, Policy, Task
from agentrl.config import RunConfig
from agentrl.record import Batch, EngineError
from agentrl.record.protocols import Bucket, EngineStats, GenerateRequest, GenerateResult, PauseMode
from agentrl.rollout import RolloutWorker
from agentrl.session import ChatFormat
from agentrl.trainer.loop import TrainLoop
from tests.support.asynchrony import settle
from tests.support.rollout import build_worker, count_fates, read_fates, rollout_config
from tests.support.scripted import Sampled, ScriptedEngine

MODES = ("wait", "drop", "requeue", "mask", "train")


@dataclass(frozen=True)
class Setting:
    """A run's configuration, and the seed of everything that happens in it."""

    batch: int
    sync: int
    eta: str
    slack: int
    n: int
    concurrent: int
    mode: str
    partial: bool
    attempts: int
    tasks: int
    epochs: int
    engines: int
    deaths: int
    seed: int

    @property
    def max_lag(self) -> int:
        return ceil(Fraction(self.eta)) + self.slack

    @property
    def limit(self) -> int:
        """Most groups between admission and the publication after their training."""
        return floor(self.batch * self.sync * (1 + Fraction(self.eta)))

    def config(self, folder: Path) -> RunConfig:
        return rollout_config(
            folder,
            f"rollout.n={self.n}",
            f"rollout.max_concurrent={self.n + self.concurrent}",
            f"rollout.max_attempts={self.attempts}",
            f"rollout.max_head_offpolicyness={self.max_lag}",
            "rollout.max_untrainable_groups=1000",
            f"rollout.n_gpus_per_node={self.engines}",
            f"actor.ppo_mini_batch_size={self.batch}",
            f"async_training.trigger_parameter_sync_step={self.sync}",
            f"async_training.staleness_threshold={self.eta}",
            f"async_training.partial_rollout={str(self.partial).lower()}",
            f"async_training.on_stale={self.mode}",
            f"trainer.total_epochs={self.epochs}",
            tasks=self.tasks,
        )


def settings_of(mode: str, *, deaths: int = 0) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        batch=st.sampled_from([1, 1, 2]),
        sync=st.sampled_from([1, 1, 2, 3]),
        eta=st.sampled_from(["0", "0.15", "0.5", "1", "1.5", "2"]),
        slack=st.integers(0, 1),
        n=st.integers(2, 3),
        concurrent=st.sampled_from([0, 6, 40]),
        mode=st.just(mode),
        partial=st.sampled_from([True, True, False]),
        attempts=st.integers(2 if mode == "requeue" else 1, 3),
        tasks=st.integers(1, 16),
        epochs=st.integers(1, 2),
        engines=st.integers(1, 2),
        deaths=st.integers(min(1, deaths), deaths),
        seed=st.integers(0, 2**32),
    )


class MortalEngine(ScriptedEngine):
    """Knows which weights it holds. A dead one answers nothing, also nothing it was asked before."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda request: Sampled([5] * world.random.randint(1, 4)))
        self.world = world
        self.weights: str | None = "0"
        self.life = 0
        self.dead = False
        self.before_token = world.before_token
        self._incoming: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert self.weights is not None, "a new process was asked before it had its weights"
        return await self._while_alive(lambda: super(MortalEngine, self).generate(request))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._while_alive(super().pause)

    async def resume(self) -> None:
        await self._while_alive(super().resume)

    async def start_weight_update(self) -> None:
        self._incoming = set()
        await self._while_alive(super().start_weight_update)

    async def update_weights(self, bucket: Bucket) -> None:
        self._incoming.add(bucket.segment)
        await self._while_alive(lambda: super(MortalEngine, self).update_weights(bucket))

    async def finish_weight_update(self, version: int) -> None:
        await self._while_alive(lambda: super(MortalEngine, self).finish_weight_update(version))
        (self.weights,) = self._incoming
        assert self.world.weights_of.setdefault(version, self.weights) == self.weights, (
            "a version is one set of weights"
        )

    async def stats(self) -> EngineStats:
        return await self._while_alive(super().stats)

    def die(self) -> None:
        self.dead = True

    def come_back(self) -> None:
        self.dead, self.weights, self.version = False, None, 0
        self.life += 1
        self._going.set()

    async def _while_alive(self, call: Callable[[], Any]) -> Any:
        life = self.life
        await self.world.hold(0.1)
        if not self.dead and life == self.life:
            result = await call()
            if not self.dead and life == self.life:
                return result
        await asyncio.Event().wait()


class Actor:
    """Checks what it is given to train."""

    model = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.weights = 0
        self.trained: Counter[str] = Counter()

    def named_tensors(self) -> Any:
        return str(self.weights)

    def update(self, batch: Batch) -> dict[str, float]:
        setting, version = self.world.setting, self.world.loop.version
        assert batch.version == version, "the weights that train are those the batch was taken for"
        assert 1 <= len(batch.groups) <= setting.batch
        for trajectory in batch.trajectories:
            versions = np.concatenate([branch.trained_versions for branch in trajectory.branches])
            assert versions.size and versions.min() >= trajectory.version_admitted
            assert setting.partial or len(set(versions.tolist())) == 1
            if batch.min_version is not None:
                versions = versions[versions >= batch.min_version]
            if versions.size and setting.mode != "train":
                assert version - versions.min() <= setting.max_lag
            if versions.size:
                self.trained[trajectory.episode_id] += 1
        self.weights += 1
        taken = {"actor/grad_norm": 1.0, "actor/skipped_steps": 0.0, "actor/nonfinite_steps": 0.0}
        return {"actor/loss": 0.0, "tokens/packed": 1.0, **taken}


class Sender:
    """Two buckets on their way at a time; the first failed delivery ends the transfer."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def connect(self, receivers: Any, join: Any) -> None: ...

    async def send(self, tensors: str, deliver: Any) -> int:
        async def one(index: int) -> None:
            await self.world.hold(0.3)
            await deliver(Bucket(index, tensors, 0, 0, ()))

        deliveries = [asyncio.ensure_future(one(index)) for index in range(2)]
        try:
            await asyncio.gather(*deliveries)
        finally:
            for delivery in deliveries:
                delivery.cancel()
            await asyncio.gather(*deliveries, return_exceptions=True)
        return 0


class Remote:
    """The rollout side as the trainer sees it from another process: calls and answers take their time."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            await self.world.hold(0.2)
            result = await getattr(self.world.worker, name)(*arguments)
            await self.world.hold(0.2)
            return result

        return call


class World:
    """One run, and the adversary that decides in which order things happen in it."""

    worker: RolloutWorker
    loop: TrainLoop

    def __init__(self, setting: Setting, folder: Path, chat_format: ChatFormat) -> None:
        self.setting = setting
        self.random = random.Random(setting.seed)
        self.weights_of: dict[int, str] = {0: "0"}
        self.folder = folder
        self._held: list[asyncio.Event] = []
        self._starved: list[asyncio.Event] = []
        self._stragglers = {f"g{i}" for i in range(20) if self.random.random() < 0.15}
        self._deaths = setting.deaths
        self._dying: set[asyncio.Task[None]] = set()
        self._failures = self.random.choice([0.0, 0.1, 0.5])
        self._starves = self.random.choice(["oldest", "newest", "nobody"])
        self._whims = self.random.choice([0.0, 0.05, 0.3])
        self.engines = {f"engine-{i}": MortalEngine(self) for i in range(setting.engines)}
        config = setting.config(folder)
        self.worker = build_worker(config, chat_format, self.engines, loop=self._agent(), run_dir=folder)
        self.worker._writer = None
        self.actor = Actor(self)
        self.loop = self._train_loop()(
            config,
            actor=self.actor,  # type: ignore[arg-type]
            rollout=Remote(self),  # type: ignore[arg-type]
            sender=Sender(self),  # type: ignore[arg-type]
            sink=Rows(),
            run_dir=None,
        )

    async def hold(self, probability: float) -> None:
        """With some probability the caller goes on only when the adversary lets it."""
        if self.random.random() < probability:
            self._held.append(event := asyncio.Event())
            await event.wait()

    async def before_token(self, request: GenerateRequest, position: int) -> None:
        """Stragglers stop after their first token, and go on only when nothing else can."""
        if position == 1 and request.request_id.partition(".")[0] in self._stragglers:
            self._starved.append(event := asyncio.Event())
            await event.wait()
        await self.hold(0.5)

    async def run(self) -> None:
        rollout = asyncio.create_task(self.worker.run())
        training = asyncio.create_task(self.loop.run())
        idle = 0
        while not training.done():
            for _ in range(self.random.choice((0, 0, 1, 3, 10))):
                await asyncio.sleep(0)
            self._check()
            if self._deaths and self.random.random() < 0.03:
                self._kill(self.random.choice(list(self.engines)))
            if not self._held:
                await settle(200)
            if self._held or self._starved:
                self._release()
                idle = 0
            else:
                idle += 1
                assert idle < 20, f"deadlock: {self.worker._waits.describe()}; {rollout}"
        training.result()
        await self.worker.stop()
        await rollout
        for dying in self._dying:
            dying.cancel()

    def check_end(self) -> None:
        setting, rows = self.setting, read_fates(self.folder)
        fates = count_fates(rows)
        assert len(rows) == self.worker._ledger.dispatched == setting.n * setting.tasks * setting.epochs
        ends = Counter((row["epoch"], row["dataset_index"]) for row in rows)
        assert set(ends.values()) == {setting.n} and len(ends) == setting.tasks * setting.epochs
        assert {row["episode_id"] for row in rows if row["fate"] == "trained"} == set(self.actor.trained)
        assert set(self.actor.trained.values()) <= {1}, "each episode is trained once"
        assert all(1 <= row["attempts"] <= setting.attempts for row in rows)
        assert "cancelled" not in fates
        if setting.mode == "train" or (setting.mode == "wait" and not setting.deaths):
            assert "stale" not in fates
        assert not self.worker._dispatcher._plans and not self.worker._router._last
        assert (self.worker._gate.running_episodes, len(self.worker._buffer)) == (0, 0)

    def _check(self) -> None:
        gate, ledger = self.worker._gate, self.worker._ledger
        assert ledger.dispatched == sum(ledger.fates.values()) + ledger.in_flight
        assert gate.running_groups + gate.queued_groups + gate.taken_groups <= self.setting.limit
        assert gate.queued_groups == len(self.worker._buffer)
        assert 0 <= gate.running_episodes <= self.setting.n + self.setting.concurrent
        assert gate.running_episodes <= ledger.in_flight

    def _release(self) -> None:
        if not self._held:
            self._starved.pop(0).set()
            return
        place = {"oldest": -1, "newest": 0, "nobody": self.random.randrange(len(self._held))}[self._starves]
        if self.random.random() < self._whims:
            place = self.random.randrange(len(self._held))
        self._held.pop(place).set()

    def _kill(self, name: str) -> None:
        if not self.engines[name].dead:
            self._deaths -= 1
            self.engines[name].die()
            self._dying.add(asyncio.create_task(self._die(name)))

    async def _die(self, name: str) -> None:
        engine = self.engines[name]
        await self.hold(0.9)
        others = any(not other.dead for other in self.engines.values())
        restarting = not others or self.random.random() < 0.8
        await self.worker.engine_lost(name, restarting)
        await self.hold(0.9)
        if restarting:
            engine.come_back()
            await self.worker.engine_restarted(name)

    def _agent(self) -> type[AgentLoop]:
        world = self

        class Player(AgentLoop):
            async def run(self, task: Task, policy: Policy) -> float:
                for _ in range(world.random.randint(1, 2)):
                    await policy.generate([70, 71])
                    await world.hold(0.2)
                if world.random.random() < world._failures:
                    raise world.random.choice([EnvError("died"), RuntimeError("bug"), EngineError("refused")])
                return float(world.random.randint(0, 6))

        return Player

    def _train_loop(self) -> type[TrainLoop]:
        world = self

        class Held(TrainLoop):
            async def _compute(self, function: Callable[..., Any], *args: object) -> Any:
                await world.hold(0.5)
                result = function(*args)
                await world.hold(0.5)
                return result

        return Held


class Rows(list[dict[str, float]]):
    def write(self, row: dict[str, float]) -> None:
        self.append(row)


def play(setting: Setting, chat_format: ChatFormat) -> None:
    async def limited() -> World:
        async with asyncio.timeout(30):
            world = World(setting, Path(folder), chat_format)
            await world.run()
            return world

    with tempfile.TemporaryDirectory() as folder:
        world = asyncio.run(limited())
        world.check_end()


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures on purpose are not worth a line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


RANDOM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
LONG = settings(RANDOM, max_examples=400)


@pytest.mark.parametrize("mode", MODES)
def test_random_runs_keep_every_promise(mode: str, chat_format: ChatFormat) -> None:
    RANDOM(given(settings_of(mode))(lambda setting: play(setting, chat_format)))()


@pytest.mark.parametrize("mode", MODES)
def test_random_runs_whose_engines_die_and_come_back_keep_every_promise(mode: str, chat_format: ChatFormat) -> None:
    RANDOM(given(settings_of(mode, deaths=3))(lambda setting: play(setting, chat_format)))()


@pytest.mark.full
@pytest.mark.parametrize("deaths", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_random_runs_at_length(mode: str, deaths: int, chat_format: ChatFormat) -> None:
    LONG(given(settings_of(mode, deaths=deaths))(lambda setting: play(setting, chat_format)))()
