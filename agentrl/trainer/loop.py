"""The training loop: take a batch, train on it, publish the weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agentrl.config import RunConfig
from agentrl.record import EngineError, NoProgress, RolloutEnded, WeightTransferError
from agentrl.record.protocols import PublishReport, RolloutService, RolloutStatus, TrainerStatus
from agentrl.trainer.actor import Actor
from agentrl.trainer.idle_steps import IdleSteps, why_skipped
from agentrl.trainer.lora import write_adapter
from agentrl.trainer.policy_files import Weights, snapshot, write_policy
from agentrl.weights.sender import WeightSender

T = TypeVar("T")
Row = dict[str, float]
log = logging.getLogger(__name__)

_SHADOW_SECONDS = 5.0


class MetricsSink(Protocol):
    """Where finished rows of metrics go."""

    def write(self, row: Row) -> None: ...


class TrainLoop:
    """Trains until the steps are done or no batch comes any more. Implements `record.protocols.TrainerService`.

    Only rank 0 has one and talks to the rollout side. Computing happens in one thread of its own, so that the event
    loop goes on answering. Between the first and the last step nothing but training itself keeps the trainer from its
    next batch: held-out tasks are played and policies saved meanwhile.

    Args:
        run_dir: where policies are saved, the last one as `model`; None saves nothing.
        tokenizer: saved with them.

    Attributes:
        end_seen: set once somebody has asked for the status after the end.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        actor: Actor,
        rollout: RolloutService,
        sender: WeightSender,
        sink: MetricsSink,
        run_dir: Path | None,
        tokenizer: Any = None,
    ) -> None:
        self._config = config
        self._actor = actor
        self._rollout = rollout
        self._sender = sender
        self._sink = sink
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._weights = asyncio.Lock()
        self._validating: asyncio.Task[Row] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._phase, self._phase_began = "starting", time.monotonic()
        self._rows: deque[Row] = deque(maxlen=256)
        self._accuracy_before: float | None = None
        self._accuracy: float | None = None
        self._problem = ""
        self._idle = IdleSteps()
        self._unpublished_steps = 0
        self.end_seen = asyncio.Event()
        self.version = 0
        self.step = 0

    async def run(self) -> None:
        """The whole run, from the first validation to the saved model."""
        training = asyncio.ensure_future(self._train())
        reloading = asyncio.ensure_future(self._reload_engines())
        try:
            await asyncio.wait((training, reloading), return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                # It only ends with an error: no engine is left, which the training is about to notice too.
                await asyncio.wait((training,), timeout=_SHADOW_SECONDS)
            await (training if training.done() else reloading)
        finally:
            for task in (training, reloading, self._validating, self._saving):
                if task is not None:
                    task.cancel()

    async def _train(self) -> None:
        config = self._config.trainer
        if self._config.validates and config.val_before_train:
            self._enter("validating")
            self._record(await self._validate())
            self._accuracy_before = self._accuracy
        self._since = _Clock(await self._rollout.status())
        try:
            while config.total_steps is None or self.step < config.total_steps:
                row = await self._train_step()
                self._record(row)
                self._idle.note(row)
        except RolloutEnded:
            pass
        except NoProgress as error:
            # What has been learnt is kept: the policy is validated and saved before the run ends with this.
            self._problem = str(error)
        self._problem = self._problem or self._idle.problem()
        await self._rollout.stop()
        await self._save_last()
        if self._unpublished_steps:
            await self._publish()
        if self._validating is not None:
            self._enter("validating")
            self._record(await self._validating)
        if self._config.validates:
            self._enter("validating")
            self._record(await self._validate())
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
            warning=why_skipped(later[0]) if later else "",
            val_first=self._accuracy_before,
            val_last=self._accuracy,
            problem=self._problem,
        )

    async def _train_step(self) -> Row:
        config = self._config
        self._enter("waiting for a batch")
        batch = await self._rollout.take_batch(self.version)
        async with self._weights:
            self._enter("training")
            # Asked while the trainer computes: an engine that computes too takes its time to answer.
            asking = asyncio.ensure_future(self._rollout.status())
            trained_at = time.perf_counter()
            row = await self._compute(self._actor.update, batch)
            row["time/train"] = time.perf_counter() - trained_at
            self._unpublished_steps += 1
        before, after, _ = await asyncio.gather(asking, self._rollout.status(), self._rollout.acknowledge(batch.id))
        row["overlap/engine_tokens"] = float(after.generated_tokens - before.generated_tokens)
        row |= self._since.rates(after, row)
        self._since = _Clock(after)
        self.step += 1
        row |= {"step": self.step, "policy_version": batch.version, **batch.metrics}
        row |= {"time/publish": 0.0, "time/paused": 0.0, "time/drain": 0.0}
        if self._unpublished_steps >= config.async_training.trigger_parameter_sync_step:
            row |= await self._publish()
        if _due(self.step, config.trainer.save_freq) and not self._is_last:
            await self._start_saving()
        if self._validating is not None and self._validating.done():
            row |= await self._validating
            self._validating = None
        if _due(self.step, config.trainer.test_freq) and not self._is_last:
            if self._validating is None:
                self._validating = asyncio.ensure_future(self._validate())
            else:
                log.warning("step %d is not validated: the held-out episodes of an earlier step still run", self.step)
        return row

    async def _publish(self) -> Row:
        """Sends the weights to the engines; from then on the policy has the next version."""
        self._enter("publishing weights")
        began = time.perf_counter()
        async with self._weights:
            if not self._unpublished_steps:
                return {}  # meanwhile an engine that came back was given these very weights, and all others with it
            report, nbytes = await self._send_until_accepted(self.version + 1)
            self.version = report.version
            self._unpublished_steps = 0
        return {
            "time/publish": time.perf_counter() - began,
            "time/paused": report.paused_seconds,
            "time/drain": report.drained_seconds,
            "publish/megabytes": nbytes / 1e6,
        }

    async def _send_until_accepted(self, version: int) -> tuple[PublishReport, int]:
        """One publication; while no engine takes it but one is on its way back, another one."""
        while True:
            try:
                return await self._send(version, reload=False)
            except (EngineError, WeightTransferError) as error:
                log.warning("no engine took the weights of version %d, they are sent again: %s", version, error)
                await self._rollout.weights_wanted()

    async def _send(self, version: int, *, reload: bool) -> tuple[PublishReport, int]:
        receivers = await self._rollout.begin_publish(reload)
        try:
            await self._sender.connect(receivers, self._rollout.join_weight_group)
            nbytes = await self._sender.send(self._actor.named_tensors(), self._rollout.publish_bucket)
            return await self._rollout.finish_publish(version), nbytes
        except (EngineError, WeightTransferError) as error:
            # Engines that did nothing wrong are paused in the middle of it.
            await self._rollout.abandon_publish(str(error))
            raise

    async def _reload_engines(self) -> None:
        """Gives engines that have started anew the current weights.

        Between the steps of one publication the weights are newer than the published ones: they are then published to
        all, since a version is one set of weights.

        Raises:
            EngineError: no engine is left.
        """
        while True:
            await self._rollout.weights_wanted()
            async with self._weights:
                newer = self._unpublished_steps > 0
                try:
                    await self._send(self.version + newer, reload=not newer)
                except (EngineError, WeightTransferError) as error:
                    # It is gone again, or the publication of another step had them for it.
                    log.info("no engine was given the current weights: %s", error)
                    continue
                self.version += newer
                self._unpublished_steps = 0

    async def _validate(self) -> Row:
        """Plays the held-out tasks with the policy of this moment."""
        step = self.step
        report = await self._rollout.validate()
        # Without any judged episode nothing is known, which is not an accuracy of 0.
        self._accuracy = report.accuracy if report.episodes else None
        by_environment = report.accuracies if len(report.accuracies) > 1 else {}
        return {
            "val/step": float(step),
            "val/accuracy": report.accuracy,
            **{f"val/accuracy/{name}": accuracy for name, accuracy in by_environment.items()},
            "val/reward": report.reward,
            "val/episodes": float(report.episodes),
            "val/failed": float(report.failed),
            "val/version_first": float(report.version_first),
            "val/version_last": float(report.version_last),
            "time/validate": report.seconds,
        }

    async def _start_saving(self) -> None:
        """Saves the policy of this moment while training goes on."""
        if self._run_dir is None:
            return
        if self._saving is not None:
            if not self._saving.done():
                log.warning("step %d is not saved: an earlier one is still being written", self.step)
                return
            await self._saving
        async with self._weights:
            weights = await self._compute(snapshot, self._actor.model)
        target = self._run_dir / "checkpoints" / f"step_{self.step}" / "model"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._saving = asyncio.ensure_future(asyncio.to_thread(self._write, weights, target))

    async def _save_last(self) -> None:
        """Saves the policy that is trained, before anything else can go wrong."""
        if self._saving is not None:
            await self._saving
        if self._run_dir is not None:
            self._enter("saving the model")
            weights = await self._compute(partial(snapshot, self._actor.model, copy=False))
            await asyncio.to_thread(self._write, weights, self._run_dir / "model")
            if self._config.model.lora_rank:
                await asyncio.to_thread(write_adapter, self._actor.model, self._run_dir / "adapter")

    def _write(self, weights: Weights, directory: Path) -> None:
        write_policy(self._actor.model, weights, directory, self._tokenizer)

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


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


class _Clock:
    """Rates of both sides between the end of one update and the end of the next.

    Then an engine answers at once; after a publication it would first compute all its sequences anew.
    """

    def __init__(self, status: RolloutStatus) -> None:
        self._status = status
        self._time = time.perf_counter()

    def rates(self, status: RolloutStatus, row: Row) -> Row:
        """Throughput and idle shares since then. A side is idle while it computes nothing."""
        before, seconds = self._status, time.perf_counter() - self._time
        busy = (status.engine_busy_seconds - before.engine_busy_seconds) / max(1, status.engines)
        return {
            "time/step": seconds,
            "throughput/train_tokens_per_s": row["tokens/packed"] / row["time/train"],
            "throughput/rollout_tokens_per_s": (status.generated_tokens - before.generated_tokens) / seconds,
            "idle/trainer": max(0.0, 1 - row["time/train"] / seconds),
            "idle/engine": max(0.0, 1 - busy / seconds),
        }
