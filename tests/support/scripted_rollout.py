"""A rollout side that does as it is told, for tests of the trainer's loop."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from agentrl.record import Batch, EngineError, Group, RolloutEnded
from agentrl.record.protocols import (
    Bucket,
    PublishReport,
    RolloutStatus,
    ValidationReport,
    WeightGroup,
    WeightReceivers,
)
from agentrl.weights.receiver import ParameterReceiver

_ROLLOUT_METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.1,
    "episode/turns": 1.0,
    "tokens/trained": 10.0,
    "staleness/lag_max": 0.0,
    "staleness/lag_mean": 0.0,
    "queue/size": 0.0,
    "time/wait_batch": 0.0,
}


class ScriptedRollout:
    """Hands out `batches` batches and then ends; keeps the published weights and a log of all calls."""

    def __init__(self, groups: list[Group], engine: Any, batches: int) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.engine = engine
        self.broken = False
        self._groups = groups
        self._receiver = ParameterReceiver(dict(engine.named_parameters()))
        self._left = batches
        self._taken = 0
        self._tokens = 0
        self.wanted = asyncio.Event()

    async def take_batch(self, version: int) -> Batch:
        self.calls.append(f"take {version}")
        assert version == self.version
        if not self._left:
            raise RolloutEnded("the training tasks are used up")
        self._left -= 1
        self._taken += 1
        return Batch(self._taken, version, self._groups, dict(_ROLLOUT_METRICS))

    async def acknowledge(self, batch_id: int) -> None:
        self.calls.append(f"acknowledge {batch_id}")

    async def begin_publish(self, reload: bool = False) -> WeightReceivers:
        self.calls.append(f"publish {self.version + 1}")
        if self.broken:
            raise EngineError("no engine is left")
        self._receiver.start()
        return WeightReceivers(("engine-0#0",), (1,))

    async def join_weight_group(self, group: WeightGroup) -> None:
        raise NotImplementedError

    async def abandon_publish(self, reason: str) -> None:
        self.calls.append(f"abandon: {reason}")

    async def publish_bucket(self, bucket: Bucket) -> None:
        self._receiver.receive(bucket)

    async def finish_publish(self, version: int) -> PublishReport:
        self._receiver.finish()
        self.version = version
        return PublishReport(version, 0.005, 0.0, 1)

    async def weights_wanted(self) -> None:
        if self.broken:
            raise EngineError("no engine is left")
        await self.wanted.wait()

    async def engine_lost(self, name: str, restarting: bool) -> None:
        raise NotImplementedError

    async def engine_restarted(self, name: str) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self.calls.append("stop")

    async def validate(self) -> ValidationReport:
        self.calls.append(f"validate {self.version}")
        return ValidationReport(0.1 * len(self.calls), 0.5, 8, 0, self.version, self.version, 0.1)

    async def status(self) -> RolloutStatus:
        self._tokens += 100
        return RolloutStatus(self.version, 0, 0, generated_tokens=self._tokens, engines=1)


class Rows(list[dict[str, float]]):
    def write(self, row: dict[str, float]) -> None:
        self.append(row)

    @property
    def steps(self) -> list[dict[str, float]]:
        return [row for row in self if "actor/loss" in row]


class EngineLeft(ScriptedRollout):
    """Its engine is away from time to time; counts what the trainer does about it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.away = False

    async def weights_wanted(self) -> None:
        await self.wanted.wait()
        self.wanted.clear()
        self.away = False

    async def begin_publish(self, reload: bool = False) -> WeightReceivers:
        self.calls.append(f"reload {self.version}" if reload else f"publish {self.version + 1}")
        if self.away:
            raise EngineError("no engine is left to take the weights")
        self._receiver.start()
        return WeightReceivers(("engine-0#0",), (1,))


def same_weights(a: Any, b: Any) -> bool:
    others = dict(b.named_parameters())
    return all(torch.equal(parameter, others[name]) for name, parameter in a.named_parameters())
