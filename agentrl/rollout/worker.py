"""The rollout side as one component: everything between the data and the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.names import GROUP_BASELINES
from agentrl.record import Batch, EngineError, Fate, NoProgress, PeerLost, RolloutEnded, TrajectoryWriter
from agentrl.record.errors import leaves
from agentrl.record.protocols import (
    Bucket,
    Engine,
    EngineStats,
    PublishReport,
    RolloutStatus,
    ValidationReport,
    WeightGroup,
    WeightReceivers,
)
from agentrl.rollout.batch_metrics import RewardWindow, StaleShares, comes_too_late, staleness_metrics
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.episode import EpisodeRunner, Plugins
from agentrl.rollout.gate import StalenessGate
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.outside import open_gateway
from agentrl.rollout.publish import PublishCoordinator
from agentrl.rollout.router import Replica, Router
from agentrl.rollout.schedule import TaskSchedule
from agentrl.rollout.signal import Signal
from agentrl.rollout.tasks import load_tasks
from agentrl.rollout.validation import Validator
from agentrl.rollout.waits import WaitBoard
from agentrl.session import ChatFormat

log = logging.getLogger(__name__)

_STATS_SECONDS = 2.0
_STOP_SECONDS = 2.0
"""How long the end waits for agents and environments to close; a host kills the process soon after."""

_ANSWER_SECONDS = 15.0
"""How much later than its process group an engine may answer."""


class RolloutWorker:
    """Implements `record.protocols.RolloutService`.

    Args:
        plugins: by environment.
        engines: by name; they may live anywhere.
        run_dir: where fates and trajectories are written; None writes nothing.
        reconnect: told the name of an engine whose process was started anew.

    Attributes:
        gateway: where agents of other frameworks reach their episodes. It has to run beside the worker, and longer:
            held-out tasks are played when the training episodes have ended.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        chat_format: ChatFormat,
        plugins: Mapping[str, Plugins],
        engines: Mapping[str, Engine],
        run_dir: Path | None,
        reconnect: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._config = config
        self._changed = Signal()
        self._router = Router(engines, self._changed)
        self._publish = PublishCoordinator(
            self._router,
            # An engine whose group fails says so when the group's time is up; it is not silent before that.
            timeout=config.weights.timeout + _ANSWER_SECONDS,
            pause="keep" if config.async_training.partial_rollout else "wait",
        )
        self._gate = StalenessGate.from_config(config)
        self._buffer = Buffer(self._gate, batch_groups=config.groups_per_step, on_stale=config.async_training.on_stale)
        self._ledger = Ledger(run_dir / "fates.jsonl" if run_dir else None)
        self._writer = TrajectoryWriter(run_dir / "trajectories", "train") if run_dir else None
        self._rewards = RewardWindow()
        self._stale_shares = StaleShares()
        self._waits = WaitBoard()
        self._reconnect = reconnect
        self._welcomes: set[asyncio.Task[None]] = set()
        self._taken: dict[int, Batch] = {}
        self._batches = 0
        self._ended = self._problem = ""
        self._drained_seconds = 0.0
        self._stats: dict[Replica, EngineStats] = {}
        self._publishing = False
        self._dispatching: asyncio.Task[None] | None = None
        self.gateway, outside = open_gateway(config, over=lambda: self._ended)
        runner = EpisodeRunner(
            config, plugins, chat_format, self._router, self._router.forget, door=self.gateway, outside=outside
        )
        self._dispatcher = Dispatcher(
            TaskSchedule.from_config(config, load_tasks(config, "train")),
            runner,
            gate=self._gate,
            buffer=self._buffer,
            ledger=self._ledger,
            changed=self._changed,
            group_size=config.rollout.n,
            max_attempts=config.rollout.max_attempts,
            plays_greedy=config.plays_greedy,
            needs_baseline=config.algorithm.adv_estimator in GROUP_BASELINES,
            filter_zero_variance=config.filters_zero_variance,
            max_untrainable=config.rollout.max_untrainable_groups or 20 * config.groups_per_step,
            filtered=self._rewards.filtered,
        )
        self._validator = Validator(
            [task for tasks in load_tasks(config, "val").values() for task in tasks[: config.val.limit]],
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

    async def watch(self) -> None:
        """Logs what has been waited for for long, until cancelled."""
        await self._waits.watch()

    async def stop(self) -> None:
        """Ends all training episodes; whatever has no fate yet is cancelled."""
        self._ended = self._ended or "the run has ended"
        if self._dispatching is not None and not self._dispatching.done():
            self._dispatching.cancel()
            await asyncio.wait([self._dispatching], timeout=_STOP_SECONDS)
        self._buffer.clear()
        self._gate.clear()
        self._taken.clear()
        self._ledger.seal_rest(self._ended, self._gate.version)
        self._changed.notify()

    async def take_batch(self, version: int) -> Batch:
        if version > self._gate.version:
            raise ValueError(f"a batch was asked for version {version}, but {self._gate.version} is published")
        started = time.perf_counter()
        with self._waits.waiting("a batch", self._batch_holders):
            while True:
                self._drop_stale()
                groups = None if self._weights_are_due else self._buffer.take(last=self._no_more_groups)
                if groups is not None:
                    break
                self._check_more_will_come()
                await self._changed.wait()
        self._changed.notify()
        masks = self._config.async_training.on_stale == "mask"
        batch = Batch(self._batches, self._gate.version, groups, min_version=self._gate.min_version if masks else None)
        self._batches += 1
        self._taken[batch.id] = batch
        self._stale_shares.add(batch)
        batch.metrics = {
            **self._rewards.metrics(batch),
            **staleness_metrics(batch),
            **self._stale_shares.metrics(),
            "queue/size": float(len(self._buffer)),
            "queue/running_groups": float(self._gate.running_groups),
            "time/wait_batch": time.perf_counter() - started,
        }
        return batch

    async def acknowledge(self, batch_id: int) -> None:
        batch = self._taken.pop(batch_id, None)
        if batch is None:
            return
        for group in batch.groups:
            self._dispatcher.forget(group)
        for trajectory in batch.trajectories:
            fate, reason = Fate.TRAINED, ""
            if comes_too_late(trajectory, batch):
                fate, reason = Fate.STALE, f"no token within the bound {self._config.max_lag}; counted in its group"
            self._ledger.seal(trajectory.episode_id, fate, reason, self._gate.version)
        self._changed.notify()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.append, batch.trajectories)

    async def begin_publish(self, reload: bool = False) -> WeightReceivers:
        began = time.perf_counter()
        self._publishing = True
        if not reload and not self._config.async_training.partial_rollout:
            self._dispatcher.admitting = False
            with self._publication("running episodes to end before an update", self._episode_holders):
                # What waits for an engine can't end before there is one, which only comes back with this update.
                await self._changed.wait_until(
                    lambda: not self._gate.running_episodes or bool(self._ended) or not self._router.serving
                )
        self._drained_seconds = time.perf_counter() - began
        with self._publication("engines to stop for an update", self._update_holders):
            return await self._publish.begin(joining_only=reload)

    async def join_weight_group(self, group: WeightGroup) -> None:
        with self._publication("engines to join the group for weights", self._update_holders):
            await self._publish.join_weight_group(group)

    async def publish_bucket(self, bucket: Bucket) -> None:
        with self._publication("engines to load weights", self._update_holders):
            await self._publish.bucket(bucket)

    async def finish_publish(self, version: int) -> PublishReport:
        with self._publication("engines to finish an update", self._update_holders):
            report = await self._publish.finish(version, drained_seconds=self._drained_seconds)
        if version != self._gate.version:
            self._gate.published(version)
        self._publishing = False
        self._dispatcher.admitting = True
        self._changed.notify()
        return report

    async def abandon_publish(self, reason: str) -> None:
        self._publish.abandon(reason)

    async def weights_wanted(self) -> None:
        # A batch that was taken is trained first: it would be one version older after an update.
        await self._changed.wait_until(
            lambda: (bool(self._router.joining) and not self._taken) or not self._router.alive
        )
        if not self._router.alive:
            raise EngineError("no engine is left to take weights")

    async def engine_lost(self, name: str, restarting: bool) -> None:
        self._router.ended(name, restarting=restarting)

    async def engine_restarted(self, name: str) -> None:
        self._reconnect(name)
        welcome = asyncio.create_task(self._welcome(self._router.replaced(name)))
        self._welcomes.add(welcome)
        welcome.add_done_callback(self._welcomes.discard)

    async def _welcome(self, replica: Replica) -> None:
        """Waits until a new engine answers; the trainer is then asked for its weights."""
        try:
            await replica.ask(replica.engine.stats())
        except (EngineError, PeerLost) as error:
            self._router.fail(replica, str(error))
        else:
            self._router.started(replica)

    @contextmanager
    def _publication(self, what: str, held_by: Callable[[], str]) -> Iterator[None]:
        """A wait that is part of one; it is over when that fails."""
        try:
            with self._waits.waiting(what, held_by):
                yield
        except BaseException:
            self._publishing = False
            self._changed.notify()
            raise

    async def validate(self) -> ValidationReport:
        with self._waits.waiting("held-out episodes", self._validator.describe):
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
            engines=len(self._router.serving),
            waiting_for=self._waits.describe(),
            gateway=self.gateway.url if self._config.plays_outside else "",
        )

    async def _engine_stats(self) -> Iterable[EngineStats]:
        """Of all engine processes there were; of one that can't tell any more, and leaves service, as it was last."""
        for replica in self._router.serving:
            try:
                async with asyncio.timeout(_STATS_SECONDS):
                    self._stats[replica] = await replica.ask(replica.engine.stats())
            except TimeoutError:
                log.info("engine %s is slow to say how it is", replica.name)
            except PeerLost as error:
                self._router.fail(replica, str(error))
            except EngineError as error:
                # Its process is about to end, and the host to say whether another one takes its place.
                log.warning("engine %s has no statistics: %s", replica.name, error)
        return self._stats.values()

    def _check_more_will_come(self) -> None:
        if self._problem:
            raise NoProgress(self._problem)
        if not self._router.alive:
            raise EngineError("no engine is left: no further batch will come")
        if self._ended or (self._no_more_groups and not len(self._buffer)):
            raise RolloutEnded(self._ended or "the training tasks are used up")

    @property
    def _weights_are_due(self) -> bool:
        """A batch taken now would be trained by weights that are about to be called one version newer."""
        return self._publishing or bool(self._router.joining)

    @property
    def _no_more_groups(self) -> bool:
        return self._dispatcher.exhausted and not self._gate.running_groups

    def _drop_stale(self) -> None:
        stale = self._buffer.drop_stale()
        if stale:
            self._changed.notify()
        for group in stale:
            self._stale_shares.add_stale(group)
            lag = self._gate.lag(group.oldest_version)
            lost = [trajectory.episode_id for trajectory in group.trajectories]
            # Under `wait` this is the doing of an engine that came back and needed newer weights before they were due.
            if self._config.async_training.on_stale in ("requeue", "wait"):
                lost = self._dispatcher.play_again(group)
            else:
                self._dispatcher.forget(group)
            for episode_id in lost:
                due = "" if self._gate.is_stale(group.oldest_version) else ", and no batch left in time"
                reason = f"{lag} versions behind, bound {self._config.max_lag}{due}"
                self._ledger.seal(episode_id, Fate.STALE, reason, self._gate.version)

    def _batch_holders(self) -> str:
        if self._weights_are_due:
            return "an engine is given its weights first"
        missing = self._config.groups_per_step - len(self._buffer)
        if missing > 0:
            return f"{missing} more finished groups are needed, {len(self._buffer)} queued, {self._episode_holders()}"
        return f"the oldest groups have to come first, version {self._gate.oldest}, {self._episode_holders()}"

    def _episode_holders(self) -> str:
        running = f"{self._gate.running_groups} groups of {self._gate.running_episodes} episodes run"
        oldest = self._ledger.longest_running()
        return running if oldest is None else f"{running}, the oldest is {oldest}"

    def _update_holders(self) -> str:
        return f"engines {', '.join(self._publish.loading) or 'none'}"
