"""The training loop: take a batch, train on it, publish the weights."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from agentrl.config import RunConfig
from agentrl.record import NoProgress, RolloutEnded
from agentrl.record.protocols import Bucket, RolloutService, RolloutStatus, TrainerStatus
from agentrl.trainer.actor import Actor
from agentrl.weights.sender import ShmSender

T = TypeVar("T")
Row = dict[str, float]


class MetricsSink(Protocol):
    """Where finished rows of metrics go."""

    def write(self, row: Row) -> None: ...


class TrainLoop:
    """Trains until the steps are done or no batch comes any more. Implements `record.protocols.TrainerService`.

    Only rank 0 has one and talks to the rollout side. Computing happens in one thread of its own, so that the event
    loop goes on answering.

    Args:
        model_dir: where the final policy is saved; None saves nothing.

    Attributes:
        end_seen: set once somebody has asked for the status after the end.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        actor: Actor,
        rollout: RolloutService,
        sender: ShmSender,
        sink: MetricsSink,
        model_dir: Path | None,
    ) -> None:
        self._config = config
        self._actor = actor
        self._rollout = rollout
        self._sender = sender
        self._sink = sink
        self._model_dir = model_dir
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._phase, self._phase_began = "starting", time.monotonic()
        self._rows: deque[Row] = deque(maxlen=256)
        self._accuracy_before: float | None = None
        self._accuracy: float | None = None
        self._problem = ""
        self._since = _Clock()
        self._published_step = 0
        self.end_seen = asyncio.Event()
        self.version = 0
        self.step = 0

    async def run(self) -> None:
        """The whole run, from the first validation to the saved model."""
        config = self._config.trainer
        if self._config.data.val and config.val_before_train:
            self._record(await self._validate())
            self._accuracy_before = self._accuracy
        await self._since.restart(self._rollout)
        try:
            while config.total_steps is None or self.step < config.total_steps:
                self._record(await self._train_step())
        except RolloutEnded:
            pass
        except NoProgress as error:
            # What has been learnt is kept: the policy is validated and saved before the run ends with this.
            self._problem = str(error)
        await self._rollout.stop()
        if self._published_step < self.step:
            await self._publish()
        if self._config.data.val:
            self._record(await self._validate())
        if self._model_dir is not None:
            self._enter("saving the model")
            await self._compute(self._actor.save, self._model_dir)
        self._enter("done")

    async def status(self, after_step: int) -> TrainerStatus:
        """State now, with the row of the first step later than `after_step`, if there is one."""
        if self._phase == "done":
            self.end_seen.set()
        later = [row for row in self._rows if row["step"] > after_step and "actor/loss" in row]
        return TrainerStatus(
            step=int(self._rows[-1]["step"]) if self._rows else 0,
            version=self.version,
            total_steps=self._config.trainer.total_steps,
            phase=self._phase,
            phase_seconds=time.monotonic() - self._phase_began,
            metrics=later[0] if later else {},
            val_first=self._accuracy_before,
            val_last=self._accuracy,
            problem=self._problem,
        )

    async def _train_step(self) -> Row:
        config = self._config
        self._enter("waiting for a batch")
        batch = await self._rollout.take_batch(self.version)
        self._enter("training")
        before = await self._rollout.status()
        trained_at = time.perf_counter()
        row = await self._compute(self._actor.update, batch)
        row["time/train"] = time.perf_counter() - trained_at
        await self._rollout.acknowledge(batch.id)
        after = await self._rollout.status()
        row["overlap/engine_tokens"] = float(after.generated_tokens - before.generated_tokens)
        self.step += 1
        row |= {"step": self.step, "policy_version": self.version, **batch.metrics}
        row |= {"time/publish": 0.0, "time/paused": 0.0, "time/drain": 0.0}
        if self.step % config.async_training.trigger_parameter_sync_step == 0:
            row |= await self._publish()
        if config.trainer.test_freq and self.step % config.trainer.test_freq == 0 and not self._is_last:
            row |= await self._validate()
        return row | await self._since.rates(self._rollout, row)

    async def _publish(self) -> Row:
        """Sends the weights to the engines; from then on the policy has the next version."""
        self._enter("publishing weights")
        began = time.perf_counter()
        await self._rollout.begin_publish()
        nbytes = await self._sender.send(self._actor.named_tensors(), self._deliver)
        report = await self._rollout.finish_publish(self.version + 1)
        self.version = report.version
        self._published_step = self.step
        return {
            "time/publish": time.perf_counter() - began,
            "time/paused": report.paused_seconds,
            "time/drain": report.drained_seconds,
            "publish/megabytes": nbytes / 1e6,
        }

    async def _deliver(self, bucket: Bucket) -> None:
        await self._rollout.publish_bucket(bucket)

    async def _validate(self) -> Row:
        self._enter("validating")
        report = await self._rollout.validate()
        # Without any judged episode nothing is known, which is not an accuracy of 0.
        self._accuracy = report.accuracy if report.episodes else None
        return {
            "val/accuracy": report.accuracy,
            "val/reward": report.reward,
            "val/episodes": float(report.episodes),
            "val/failed": float(report.failed),
            "val/version_first": float(report.version_first),
            "val/version_last": float(report.version_last),
            "time/validate": report.seconds,
        }

    @property
    def _is_last(self) -> bool:
        return self.step == self._config.trainer.total_steps

    def _record(self, row: Row) -> None:
        row = {"step": self.step, "policy_version": self.version, "time": time.time(), **row}
        self._rows.append(row)
        self._sink.write(row)

    async def _compute(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()


class _Clock:
    """Rates of both sides between one step's end and the next."""

    _status: RolloutStatus
    _time: float

    async def restart(self, rollout: RolloutService) -> None:
        self._status = await rollout.status()
        self._time = time.perf_counter()

    async def rates(self, rollout: RolloutService, row: Row) -> Row:
        """Throughput and idle shares of the step that ends now. A side is idle while it computes nothing."""
        before, began = self._status, self._time
        await self.restart(rollout)
        seconds = self._time - began
        busy = (self._status.engine_busy_seconds - before.engine_busy_seconds) / max(1, self._status.engines)
        return {
            "time/step": seconds,
            "throughput/train_tokens_per_s": row["tokens/packed"] / row["time/train"],
            "throughput/rollout_tokens_per_s": (self._status.generated_tokens - before.generated_tokens) / seconds,
            "idle/trainer": max(0.0, 1 - row["time/train"] / seconds),
            "idle/engine": max(0.0, 1 - busy / seconds),
        }
