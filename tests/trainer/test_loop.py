"""The training loop against a scripted rollout side: what it asks for, in which order, and what it writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from agentrl.observe import STEP_KEYS
from agentrl.record import Batch, EngineError
from agentrl.record.protocols import ValidationReport
from tests.support.asynchrony import until
from tests.support.scripted_rollout import ScriptedRollout, same_weights

Fixture = Callable[..., Any]


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
