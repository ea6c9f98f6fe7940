"""The value model learns what comes after each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config.names import LOSS_AGG_MODES
from agentrl.record import Batch, Group
from agentrl.tiny import tiny_model_path
from agentrl.trainer.actor import load_actor
from agentrl.trainer.critic import ValueModel
from agentrl.trainer.packing import TrainingData

Fixture = Callable[..., Any]
GAE = "algorithm.adv_estimator=gae"


def test_an_untrained_critic_says_nothing(new_actor: Fixture, new_groups: Fixture) -> None:
    critic = new_actor(GAE)._critic
    data = TrainingData.from_groups(new_groups(2, 2), 1)
    assert not critic.with_values(data)["values"].any()
    assert critic.forwards == {"values": 1}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_values_are_those_of_the_state_before_each_token(family: str, new_model: Fixture, new_branch: Fixture) -> None:
    """A token has no say in the value it is judged by, what came before it does."""
    model = ValueModel(new_model(family).model)
    torch.nn.init.normal_(model.head.weight)
    branch = new_branch(np.random.default_rng(0), turns=1)
    ids = torch.from_numpy(branch.token_ids.astype(np.int64))[None]
    places = torch.from_numpy(np.flatnonzero(branch.loss_mask) - 1)
    lengths = torch.tensor([ids.shape[1]])

    def values(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, torch.arange(ids.shape[1])[None], lengths, places)

    with torch.no_grad():
        before = values(ids)
        ids[0, places[1] + 1] += 1
        after = values(ids)
    assert torch.equal(after[:2], before[:2])
    assert (after[2:] != before[2:]).all()


def test_the_critic_learns_the_returns_and_the_policy_with_it(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor(
        GAE, "actor.ppo_mini_batch_size=2", "critic.optim.lr=0.003", "critic.cliprange_value=10", "algorithm.lam=0.9"
    )
    groups = new_groups(2, 3)
    rows = [actor.update(batch_of(groups)) for _ in range(30)]
    assert rows[-1]["critic/error"] < 0.3 * rows[0]["critic/error"]
    assert actor._critic.forwards["values"] == 30
    assert all(np.isfinite(value) for row in rows for value in row.values())
    assert {"critic/loss", "critic/grad_norm", "critic/clip_fraction", "critic/value_mean"} <= rows[0].keys()


def test_only_the_critic_learns_during_its_warm_up(new_actor: Fixture, new_groups: Fixture, batch_of: Fixture) -> None:
    actor = new_actor(
        GAE,
        "actor.ppo_mini_batch_size=2",
        "actor.optim.lr=0.01",
        "trainer.critic_warmup=2",
        "actor.optim.lr_warmup_steps=1",
    )
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    head = actor._critic.model.head.weight

    def moved() -> bool:
        return any(not torch.equal(a, b) for a, b in zip(actor.model.parameters(), before, strict=True))

    for warm in (True, True, False):
        row = actor.update(batch_of(new_groups(2, 3)))
        assert moved() is not warm and row["actor/skipped_steps"] == 0
        assert row["actor/lr"] == pytest.approx(0.01 / 2), "the schedule of the policy waits"
        assert head.any()


def test_the_decay_of_the_policys_rate_ends_with_the_run(
    new_config: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    keys = ("trainer.critic_warmup=2", "actor.optim.lr=0.01", "actor.optim.lr_scheduler_type=linear")
    config = new_config(GAE, *keys, "trainer.total_steps=4", "actor.ppo_mini_batch_size=2")
    actor = load_actor(config, str(tiny_model_path()))
    rates = [actor.update(batch_of(new_groups(2, 3)))["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.005])


def test_the_update_does_not_depend_on_micro_batches(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    groups: list[Group] = new_groups(2, 3)
    results = []
    for limit in (1, 90, 100_000):
        actor = new_actor(
            GAE, "actor.ppo_mini_batch_size=2", "critic.optim.lr=0.01", f"actor.ppo_max_token_len_per_gpu={limit}"
        )
        actor.update(batch_of(groups))
        row = actor.update(batch_of(groups))
        results.append((row["critic/loss"], row["critic/grad_norm"]))
    for result in results[:-1]:
        assert result == pytest.approx(results[-1], rel=1e-3)


def test_with_every_token_too_old_nothing_moves(new_actor: Fixture, new_groups: Fixture) -> None:
    actor = new_actor(GAE, "actor.ppo_mini_batch_size=2", "critic.optim.lr=0.01", "critic.optim.weight_decay=0.1")
    before = [parameter.detach().clone() for parameter in actor._critic.model.parameters()]
    row = actor.update(Batch(0, 5, new_groups(2, 3), min_version=4))
    assert row["critic/loss"] == 0 and row["critic/grad_norm"] == 0 and row["actor/skipped_steps"] == 1
    assert row["critic/skipped_fraction"] == 1
    assert all(torch.equal(a, b) for a, b in zip(actor._critic.model.parameters(), before, strict=True))


def test_tokens_too_old_to_be_trained_still_pass_returns_on(new_actor: Fixture, new_groups: Fixture) -> None:
    """Time runs over all tokens of a branch; what the critic learns from are the young ones."""
    groups: list[Group] = new_groups(2, 3)
    returns = []
    for trajectory in (t for group in groups for t in group.trajectories):
        for branch in trajectory.branches:
            where = np.flatnonzero(branch.loss_mask)
            branch.versions[where] = np.arange(len(where)) % 2
            steps = np.arange(len(where))[::-1]
            returns += (trajectory.reward * 0.5**steps)[branch.versions[where] == 1].tolist()
    actor = new_actor(GAE, "algorithm.gamma=0.5", "actor.ppo_mini_batch_size=2")
    row = actor.update(Batch(0, 1, groups, min_version=1))
    assert row["critic/error"] == pytest.approx(np.mean(np.square(returns)), rel=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_every_aggregation_is_the_same_in_every_split(
    mode: str, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    rows = [
        new_actor(
            GAE,
            "actor.ppo_mini_batch_size=2",
            f"critic.loss_agg_mode={mode}",
            f"actor.ppo_max_token_len_per_gpu={limit}",
        ).update(batch_of(new_groups(2, 3)))
        for limit in (10, 100_000)
    ]
    assert rows[0]["critic/grad_norm"] == pytest.approx(rows[1]["critic/grad_norm"], rel=1e-4)


def test_a_gradient_that_is_no_number_is_skipped_and_counted(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor(GAE, "actor.ppo_mini_batch_size=1")
    groups = new_groups(2, 3)
    actor._critic.model.backbone.embed_tokens.weight.data[groups[0].trajectories[0].branches[0].token_ids[0]] = np.nan
    row = actor.update(batch_of(groups))
    assert row["critic/skipped_fraction"] > 0
    assert actor._critic.model.head.weight.isfinite().all()


def test_values_are_told_apart_in_bfloat16_too(new_actor: Fixture, new_groups: Fixture) -> None:
    critic = new_actor(GAE, "model.dtype=bfloat16")._critic
    torch.nn.init.constant_(critic.model.head.bias, 1.003)
    values = critic.with_values(TrainingData.from_groups(new_groups(1, 2), 1))["values"]
    assert values.tolist() == [pytest.approx([1.003] * values.numel())]
