"""The training loop against a scripted rollout side: what it asks for, in which order, and what it writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.observe import STEP_KEYS
from agentrl.record import Batch, EngineError, Group, RolloutEnded
from agentrl.record.protocols import Bucket, PublishReport, RolloutStatus, ValidationReport
from agentrl.trainer.loop import TrainLoop
from agentrl.trainer.policy_files import snapshot, write_policy
from agentrl.weights.receiver import BucketReceiver
from agentrl.weights.sender import ShmSender
from tests.support.asynchrony import settle, until

Fixture = Callable[..., Any]

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
        self._receiver = BucketReceiver(dict(engine.named_parameters()))
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

    async def begin_publish(self, reload: bool = False) -> None:
        self.calls.append(f"publish {self.version + 1}")
        if self.broken:
            raise EngineError("no engine is left")
        self._receiver.start()

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


@pytest.fixture
def new_loop(tmp_path: Path, new_model: Fixture, new_groups: Fixture, new_config: Fixture, new_actor: Fixture):
    """`new_loop("key=value", ..., batches=4)`: a loop, its scripted rollout side, and the rows it writes."""

    def build(
        *overrides: str, batches: int = 100, rollout: type[ScriptedRollout] = ScriptedRollout
    ) -> tuple[TrainLoop, ScriptedRollout, Rows]:
        keys = ("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01", *overrides)
        side, rows = rollout(new_groups(2, 3), new_model(seed=9), batches), Rows()
        loop = TrainLoop(
            new_config(*keys),
            actor=new_actor(*keys),
            rollout=side,
            sender=ShmSender(tmp_path, 1 << 14),
            sink=rows,
            run_dir=tmp_path,
        )
        return loop, side, rows

    return build


def same_weights(a: Any, b: Any) -> bool:
    others = dict(b.named_parameters())
    return all(torch.equal(parameter, others[name]) for name, parameter in a.named_parameters())


def test_every_step_takes_trains_acknowledges_and_publishes(new_loop: Fixture) -> None:
    loop, rollout, rows = new_loop("trainer.total_steps=3")
    asyncio.run(loop.run())
    expected = [call for step in (1, 2, 3) for call in (f"take {step - 1}", f"acknowledge {step}", f"publish {step}")]
    assert rollout.calls == [*expected, "stop"]
    assert [(row["step"], row["policy_version"]) for row in rows] == [(1, 0), (2, 1), (3, 2)]
    assert same_weights(loop._actor.model, rollout.engine)
    assert loop._actor.forwards == {"proximal": 3, "train": 3}


def test_rows_hold_all_the_keys_of_a_step(new_loop: Fixture) -> None:
    loop, _, rows = new_loop("trainer.total_steps=2", "async_training.trigger_parameter_sync_step=2")
    asyncio.run(loop.run())
    for row in rows:
        assert set(STEP_KEYS) <= row.keys()
        assert row["time/step"] >= row["time/train"] > 0
        assert row["throughput/train_tokens_per_s"] > 0 and row["throughput/rollout_tokens_per_s"] > 0
        assert 0 <= row["idle/trainer"] <= 1 and row["idle/engine"] == 1
    assert rows[0]["time/publish"] == 0 < rows[1]["time/publish"]
    assert rows[1]["publish/megabytes"] == pytest.approx(
        sum(p.numel() * 4 for p in loop._actor.model.parameters()) / 1e6, rel=0.01
    )


def test_weights_are_published_every_so_many_steps_and_at_the_last(new_loop: Fixture) -> None:
    loop, rollout, _ = new_loop("trainer.total_steps=5", "async_training.trigger_parameter_sync_step=2")
    asyncio.run(loop.run())
    interesting = [call for call in rollout.calls if call.startswith(("take", "publish"))]
    assert interesting == [
        *("take 0", "take 0", "publish 1"),
        *("take 1", "take 1", "publish 2"),
        *("take 2", "publish 3"),
    ]


def test_a_run_ends_where_the_batches_do_and_validates_what_it_saves(new_loop: Fixture, tmp_path: Path) -> None:
    loop, rollout, rows = new_loop(
        "data.val=v:load", "async_training.trigger_parameter_sync_step=2", "trainer.total_steps=99", batches=3
    )
    asyncio.run(loop.run())
    assert rollout.calls[-4:] == ["take 1", "stop", "publish 2", "validate 2"]
    assert len(rows.steps) == 3
    assert same_weights(loop._actor.model, rollout.engine)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same_weights(saved, rollout.engine)


def test_a_run_without_any_batch_ends(new_loop: Fixture) -> None:
    loop, rollout, rows = new_loop(batches=0)
    asyncio.run(loop.run())
    assert rollout.calls == ["take 0", "stop"]
    assert rows == []


def test_validation_comes_before_between_and_after(new_loop: Fixture) -> None:
    loop, rollout, rows = new_loop("data.val=v:load", "trainer.test_freq=2", "trainer.total_steps=4")
    asyncio.run(loop.run())
    order = [call for call in rollout.calls if call.startswith(("validate", "publish"))]
    assert order == ["validate 0", "publish 1", "publish 2", "validate 2", "publish 3", "publish 4", "validate 4"]
    assert [row["val/step"] for row in rows if "val/accuracy" in row] == [0, 2, 4]
    assert rows[0]["step"] == 0 and "actor/loss" not in rows[0]


def test_the_first_validation_can_be_left_out(new_loop: Fixture) -> None:
    loop, rollout, _ = new_loop("data.val=v:load", "trainer.val_before_train=false", "trainer.total_steps=1")
    asyncio.run(loop.run())
    assert [call for call in rollout.calls if "validate" in call] == ["validate 1"]


def test_a_failed_publication_ends_the_run_with_its_error(new_loop: Fixture) -> None:
    loop, rollout, rows = new_loop()
    rollout.broken = True
    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(loop.run())
    assert loop.version == 0 and rows == []


def test_the_status_answers_while_the_trainer_computes(new_loop: Fixture) -> None:
    async def play() -> None:
        loop, _, _ = new_loop("trainer.total_steps=1", "data.val=v:load")
        update, computing, go_on = loop._actor.update, threading.Event(), threading.Event()

        def held(batch: Batch) -> dict[str, float]:
            computing.set()
            assert go_on.wait(20)
            return update(batch)

        loop._actor.update = held
        running = asyncio.create_task(loop.run())
        await asyncio.to_thread(computing.wait, 20)
        status = await asyncio.wait_for(loop.status(0), timeout=5)
        assert (status.phase, status.step, status.metrics) == ("training", 0, {})
        assert status.total_steps == 1 and status.val_first is not None
        go_on.set()
        await running
        assert not loop.end_seen.is_set()
        status = await loop.status(0)
        assert (status.phase, status.step, status.version) == ("done", 1, 1)
        assert status.metrics["step"] == 1 and status.val_last != status.val_first
        assert (await loop.status(1)).metrics == {}
        assert loop.end_seen.is_set()

    asyncio.run(play())


def test_no_step_is_missed_by_one_who_asks_rarely(new_loop: Fixture) -> None:
    async def play() -> list[float]:
        loop, _, _ = new_loop("trainer.total_steps=4")
        await loop.run()
        seen = [0.0]
        while row := (await loop.status(int(seen[-1]))).metrics:
            seen.append(row["step"])
        return seen

    assert asyncio.run(play()) == [0, 1, 2, 3, 4]


class EngineLeft(ScriptedRollout):
    """Its engine is away from time to time; counts what the trainer does about it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.away = False

    async def weights_wanted(self) -> None:
        await self.wanted.wait()
        self.wanted.clear()
        self.away = False

    async def begin_publish(self, reload: bool = False) -> None:
        self.calls.append(f"reload {self.version}" if reload else f"publish {self.version + 1}")
        if self.away:
            raise EngineError("no engine is left to take the weights")
        self._receiver.start()


def test_a_publication_that_no_engine_took_is_repeated_when_one_is_back(new_loop: Fixture) -> None:
    async def play() -> None:
        loop, rollout, rows = new_loop("trainer.total_steps=2", rollout=EngineLeft)
        rollout.away = True
        running = asyncio.create_task(loop.run())
        await until(lambda: "publish 1" in rollout.calls)
        await settle()
        assert loop.version == 0 and not running.done() and loop._phase == "publishing weights"
        rollout.wanted.set()
        await running
        assert [call for call in rollout.calls if call.startswith("publish")] == ["publish 1", "publish 1", "publish 2"]
        assert [row["policy_version"] for row in rows] == [0, 1]
        assert same_weights(loop._actor.model, rollout.engine)

    asyncio.run(play())


@pytest.mark.parametrize(("sync", "call", "version"), [(1, "reload 1", 1), (2, "publish 1", 1)])
def test_an_engine_that_wants_weights_gets_those_of_now_while_the_trainer_waits_for_a_batch(
    new_loop: Fixture, sync: int, call: str, version: int
) -> None:
    """With weights newer than the last published ones that is a new version; else the same once more."""

    class Starved(EngineLeft):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.starving, self.fed = asyncio.Event(), asyncio.Event()

        async def take_batch(self, version: int) -> Batch:
            if self._taken == 1:
                self.starving.set()
                await self.fed.wait()
                version = self.version
            return await super().take_batch(version)

        async def finish_publish(self, version: int) -> PublishReport:
            if self.starving.is_set():
                self.fed.set()
            return await super().finish_publish(version)

    async def play() -> None:
        keys = ("trainer.total_steps=2", f"async_training.trigger_parameter_sync_step={sync}")
        loop, rollout, rows = new_loop(*keys, rollout=Starved)
        running = asyncio.create_task(loop.run())
        await rollout.starving.wait()
        before = loop.version
        rollout.wanted.set()
        await running
        assert rollout.calls.count(call) == 1
        assert before == (1 if sync == 1 else 0)
        assert [row["policy_version"] for row in rows] == [0, version]
        # After the early publication the count of steps begins anew: the last step's weights come with the end.
        assert rollout.calls[-1] == ("stop" if sync == 1 else "publish 2")
        assert same_weights(loop._actor.model, rollout.engine)

    asyncio.run(play())


class Open(ScriptedRollout):
    """Its validations after the first step end when they are let go."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go_on = asyncio.Event()

    async def validate(self) -> ValidationReport:
        report = await super().validate()
        if self.version:
            await self.go_on.wait()
        return report


def test_a_validation_goes_on_beside_the_training(new_loop: Fixture) -> None:
    async def play() -> None:
        loop, rollout, rows = new_loop("data.val=v:load", "trainer.test_freq=3", "trainer.total_steps=5", rollout=Open)
        running = asyncio.create_task(loop.run())
        await until(lambda: len(rows.steps) == 4)
        assert not rollout.go_on.is_set() and not any("val/step" in row for row in rows.steps)
        rollout.go_on.set()
        await running
        assert [(row["step"], row["val/step"]) for row in rows if "val/step" in row] == [(0, 0), (5, 3), (5, 5)]
        assert rollout.calls.count("validate 3") == 1

    asyncio.run(play())


def test_a_validation_still_open_at_the_end_is_waited_for_and_recorded(new_loop: Fixture, tmp_path: Path) -> None:
    async def play() -> None:
        loop, rollout, rows = new_loop("data.val=v:load", "trainer.test_freq=2", "trainer.total_steps=3", rollout=Open)
        running = asyncio.create_task(loop.run())
        await until(lambda: "stop" in rollout.calls)
        assert len(rows.steps) == 3
        await until(lambda: loop._phase == "validating")
        assert (tmp_path / "model").is_dir(), "what was trained is saved first"
        rollout.go_on.set()
        await running
        assert [(row["step"], row["val/step"]) for row in rows if "val/step" in row] == [(0, 0), (3, 2), (3, 3)]
        assert loop._accuracy == rows[-1]["val/accuracy"]

    asyncio.run(play())


def test_a_validation_that_fails_ends_the_run_with_its_error(new_loop: Fixture) -> None:
    class Failing(ScriptedRollout):
        async def validate(self) -> ValidationReport:
            if self.version:
                raise EngineError("no engine is left")
            return await super().validate()

    loop, _, _ = new_loop("data.val=v:load", "trainer.test_freq=1", "trainer.total_steps=3", rollout=Failing)
    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(loop.run())


def test_policies_are_saved_as_they_were_while_training_goes_on(
    new_loop: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes until all steps are done; what is written is the policy of its step all the same."""
    go_on, started = threading.Event(), threading.Event()

    def held(*args: Any) -> None:
        started.set()
        assert go_on.wait(20)
        write_policy(*args)

    monkeypatch.setattr("agentrl.trainer.loop.write_policy", held)

    async def play() -> dict[int, dict[str, torch.Tensor]]:
        loop, _, rows = new_loop("trainer.save_freq=2", "trainer.total_steps=3")
        weights: dict[int, dict[str, torch.Tensor]] = {}
        update = loop._actor.update

        def remember(batch: Batch) -> dict[str, float]:
            row = update(batch)
            weights[len(weights) + 1] = {name: p.detach().clone() for name, p in loop._actor.model.named_parameters()}
            return row

        loop._actor.update = remember
        running = asyncio.create_task(loop.run())
        await until(lambda: len(rows) == 3)
        assert started.is_set() and not running.done() and not (tmp_path / "checkpoints/step_2/model").exists()
        go_on.set()
        await running
        assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), loop._actor.model)
        return weights

    weights = asyncio.run(play())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    assert [path.name for path in (tmp_path / "checkpoints/step_2").iterdir()] == ["model"]
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/step_2/model", dtype=torch.float32)
    names = {name for name, _ in saved.named_parameters()}
    assert names == set(weights[2])
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, weights[2][name]) and not torch.equal(parameter, weights[3][name])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_saved_snapshot_loads_as_the_model_it_was(new_actor: Fixture, tmp_path: Path, family: str) -> None:
    """With and without tied embeddings."""
    actor = new_actor(family=family)
    weights = snapshot(actor.model)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.zero_()
    write_policy(actor.model, weights, tmp_path / "model")
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    original: Any = new_actor(family=family).model
    assert same_weights(saved, original)
    assert not (tmp_path / "model.partial").exists()
    ids = torch.arange(8)[None]
    original.set_attn_implementation("sdpa")
    assert torch.allclose(saved(input_ids=ids).logits, original(input_ids=ids).logits, atol=1e-5)


def test_weights_that_an_engine_was_given_meanwhile_are_not_published_again(new_loop: Fixture) -> None:
    """An engine comes back while a batch is trained: it asks as soon as the batch is acknowledged."""

    class BackInTime(EngineLeft):
        async def acknowledge(self, batch_id: int) -> None:
            await super().acknowledge(batch_id)
            if batch_id == 1:
                self.wanted.set()
                await settle()

    loop, rollout, _ = new_loop("trainer.total_steps=2", rollout=BackInTime)
    asyncio.run(loop.run())
    assert [call for call in rollout.calls if call.startswith("publish")] == ["publish 1", "publish 2"]
    assert loop.version == 2 and same_weights(loop._actor.model, rollout.engine)


def test_a_validation_that_falls_due_while_one_runs_is_left_out(new_loop: Fixture) -> None:
    async def play() -> None:
        loop, rollout, rows = new_loop("data.val=v:load", "trainer.test_freq=1", "trainer.total_steps=4", rollout=Open)
        running = asyncio.create_task(loop.run())
        await until(lambda: "stop" in rollout.calls)
        rollout.go_on.set()
        await running
        assert len(rows.steps) == 4, "no step waited"
        assert [row["val/step"] for row in rows if "val/step" in row] == [0, 1, 4]

    asyncio.run(play())
