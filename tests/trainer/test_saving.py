"""Policies on disk: what is saved is what was trained, while training goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.record import Batch
from agentrl.trainer.policy_files import snapshot, write_policy
from tests.support.asynchrony import until
from tests.support.scripted_rollout import same_weights

Fixture = Callable[..., Any]


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
