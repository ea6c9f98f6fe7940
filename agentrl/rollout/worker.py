"""The rollout side as one component: everything between the data and the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.names import GROUP_BASELINES
from agentrl.record import Batch, EngineError, Fate, Group, NoProgress, PeerLost, RolloutEnded, TrajectoryWriter
from agentrl.record.errors import leaves
from agentrl.record.protocols import Bucket, Engine, EngineStats, PublishReport, RolloutStatus, ValidationReport
from agentrl.rollout.batch_metrics import RewardWindow, staleness_metrics
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.episode import EpisodeRunner, Plugins
from agentrl.rollout.gate import StalenessGate
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.publish import PublishCoordinator
from agentrl.rollout.router import Router
from agentrl.rollout.signal import Signal
from agentrl.rollout.tasks import epochs, load_tasks
from agentrl.rollout.validation import Validator
from agentrl.session import ChatFormat


class RolloutWorker:
    """Implements `record.protocols.RolloutService`.

    Args:
        engines: by name; they may live anywhere.
        run_dir: where fates and trajectories are written; None writes nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        chat_format: ChatFormat,
        plugins: Plugins,
        engines: Mapping[str, Engine],
        run_dir: Path | None,
    ) -> None:
        self._config = config
        self._changed = Signal()
        self._router = Router(engines, self._changed)
        self._publish = PublishCoordinator(self._router)
        self._gate = StalenessGate.from_config(config)
        self._buffer = Buffer(self._gate, batch_groups=config.groups_per_step, on_stale=config.async_training.on_stale)
        self._ledger = Ledger(run_dir / "fates.jsonl" if run_dir else None)
        self._writer = TrajectoryWriter(run_dir / "trajectories", "train") if run_dir else None
        self._rewards = RewardWindow()
        self._taken: dict[int, list[Group]] = {}
        self._batches = 0
        self._ended = self._problem = ""
        self._drained_seconds = 0.0
        self._stats: dict[str, EngineStats] = {}
        self._dispatching: asyncio.Task[None] | None = None
        runner = EpisodeRunner(config, plugins, chat_format, self._router, self._router.forget)
        tasks = load_tasks(config.data, "train")
        steps, total_epochs = config.trainer.total_steps, config.trainer.total_epochs
        self._dispatcher = Dispatcher(
            epochs(
                tasks,
                shuffle=config.data.shuffle,
                seed=config.data.seed,
                total_epochs=total_epochs if total_epochs is not None else None if steps else 1,
            ),
            runner,
            gate=self._gate,
            buffer=self._buffer,
            ledger=self._ledger,
            changed=self._changed,
            group_size=config.rollout.n,
            needs_baseline=config.algorithm.adv_estimator in GROUP_BASELINES,
            filter_zero_variance=config.filters_zero_variance,
            max_untrainable=config.rollout.max_untrainable_groups or 20 * config.groups_per_step,
            filtered=self._rewards.filtered,
        )
        self._validator = Validator(
            load_tasks(config.data, "val")[: config.val.limit],
            runner,
            repeats=config.val.n,
            max_concurrent=config.rollout.max_concurrent,
            writer=TrajectoryWriter(run_dir / "trajectories", "val") if run_dir else None,
        )

    async def run(self) -> None:
        """Dispatches episodes until `stop`, or until the tasks are used up.

        Raises:
            EngineError: no engine is left to serve them.
        """
        self._dispatching = dispatching = asyncio.ensure_future(self._dispatcher.run())
        dispatching.add_done_callback(lambda _: self._changed.notify())

        def failed() -> bool:
            return dispatching.done() and not dispatching.cancelled() and dispatching.exception() is not None

        try:
            await self._changed.wait_until(lambda: bool(self._ended) or failed() or not self._router.alive)
            if failed():
                failures = leaves(dispatching.exception())
                self._problem = next((str(error) for error in failures if isinstance(error, NoProgress)), "")
                if not self._problem:
                    dispatching.result()
                self._changed.notify()
                # The trainer is told with its next batch; it validates and saves what there is, then stops the run.
                await self._changed.wait_until(lambda: bool(self._ended) or not self._router.alive)
            if not self._ended and not self._router.alive:
                self._ended = "no engine is left"
                raise EngineError("no engine is left to serve the episodes")
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Ends all training episodes; whatever has no fate yet is cancelled."""
        self._ended = self._ended or "the run has ended"
        if self._dispatching is not None and not self._dispatching.done():
            self._dispatching.cancel()
            await asyncio.wait([self._dispatching])
        self._buffer.clear()
        self._gate.clear()
        self._taken.clear()
        self._ledger.seal_rest(self._ended, self._gate.version)
        self._changed.notify()

    async def take_batch(self, version: int) -> Batch:
        if version != self._gate.version:
            raise ValueError(f"a batch was asked for version {version}, but {self._gate.version} is published")
        started = time.perf_counter()
        while True:
            self._drop_stale()
            groups = self._buffer.take(last=self._no_more_groups)
            if groups is not None:
                break
            self._check_more_will_come()
            await self._changed.wait()
        self._changed.notify()
        batch = Batch(self._batches, version, groups)
        self._batches += 1
        self._taken[batch.id] = groups
        batch.metrics = {
            **self._rewards.metrics(batch),
            **staleness_metrics(batch),
            "queue/size": float(len(self._buffer)),
            "queue/running_groups": float(self._gate.running_groups),
            "time/wait_batch": time.perf_counter() - started,
        }
        return batch

    async def acknowledge(self, batch_id: int) -> None:
        groups = self._taken.pop(batch_id, [])
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory in trajectories:
            self._ledger.seal(trajectory.episode_id, Fate.TRAINED, "", self._gate.version)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.append, trajectories)

    async def begin_publish(self) -> None:
        began = time.perf_counter()
        if not self._config.async_training.partial_rollout:
            self._dispatcher.admitting = False
            await self._changed.wait_until(lambda: not self._gate.running_episodes or bool(self._ended))
        self._drained_seconds = time.perf_counter() - began
        await self._publish.begin()

    async def publish_bucket(self, bucket: Bucket) -> None:
        await self._publish.bucket(bucket)

    async def finish_publish(self, version: int) -> PublishReport:
        report = await self._publish.finish(version, drained_seconds=self._drained_seconds)
        self._gate.published(version)
        self._dispatcher.admitting = True
        self._changed.notify()
        return report

    async def validate(self) -> ValidationReport:
        return await self._validator.validate(self._gate.version)

    async def status(self) -> RolloutStatus:
        stats = await self._engine_stats()
        return RolloutStatus(
            version=self._gate.version,
            dispatched=self._ledger.dispatched,
            in_flight=self._ledger.in_flight,
            fates={fate.value: count for fate, count in self._ledger.fates.items()},
            running_episodes=self._gate.running_episodes,
            running_groups=self._gate.running_groups,
            queued_groups=len(self._buffer),
            capacity=self._gate.capacity(),
            generated_tokens=sum(s.generated_tokens for s in stats),
            engine_busy_seconds=sum(s.busy_seconds for s in stats),
            engines=sum(replica.serving for replica in self._router.replicas),
            waiting_for=self._waiting_for(),
        )

    async def _engine_stats(self) -> list[EngineStats]:
        """Of all engines; of one that can't tell any more, and leaves service, as it was last."""
        for replica in [replica for replica in self._router.replicas if replica.serving]:
            try:
                self._stats[replica.name] = await replica.engine.stats()
            except (EngineError, PeerLost) as error:
                self._router.fail(replica, str(error))
        return list(self._stats.values())

    def _check_more_will_come(self) -> None:
        if self._problem:
            raise NoProgress(self._problem)
        if not self._router.alive:
            raise EngineError("no engine is left: no further batch will come")
        if self._ended or (self._no_more_groups and not len(self._buffer)):
            raise RolloutEnded(self._ended or "the training tasks are used up")

    @property
    def _no_more_groups(self) -> bool:
        return self._dispatcher.exhausted and not self._gate.running_groups

    def _drop_stale(self) -> None:
        stale = self._buffer.drop_stale()
        if stale:
            self._changed.notify()
        for group in stale:
            lag = self._gate.lag(group.oldest_version)
            for trajectory in group.trajectories:
                reason = f"{lag} versions behind, bound {self._config.max_lag}"
                self._ledger.seal(trajectory.episode_id, Fate.STALE, reason, self._gate.version)

    def _waiting_for(self) -> str:
        missing = self._config.groups_per_step - len(self._buffer)
        running = f"{self._gate.running_groups} groups of {self._gate.running_episodes} episodes run"
        if missing > 0:
            return f"{missing} more finished groups ({running})"
        return f"the oldest groups, version {self._gate.oldest} ({running})"
