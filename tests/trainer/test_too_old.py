"""`async_training.on_stale: mask`: older tokens are not trained, but their episodes count in their groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.record import Batch, Group
from tests.support.gradients import assert_gradients_agree, moved, weights_of

Fixture = Callable[..., Any]

BYPASS = "actor.proximal=bypass"
REINFORCE = "algorithm.rollout_correction.loss_type=reinforce"


class TestTooOldToTrain:
    """`async_training.on_stale: mask`: older tokens are not trained, but their episodes count in their groups."""

    def aged(self, groups: list[Group]) -> list[Group]:
        """The groups with the first third of each branch's trained tokens sampled under version 0, the rest under 1."""
        for group in groups:
            for branch in (b for trajectory in group.trajectories for b in trajectory.branches):
                where = np.flatnonzero(branch.loss_mask)
                branch.versions[where] = 1
                branch.versions[where[: len(where) // 3]] = 0
        return groups

    @pytest.mark.parametrize("estimator", ["grpo", "rloo"])
    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["actor.loss_agg_mode=seq-mean-token-mean"],
            ["actor.loss_agg_mode=episode-mean"],
            [BYPASS],
            [BYPASS, REINFORCE],
        ],
        ids=lambda overrides: "+".join(o.split("=")[-1] for o in overrides) or "default",
    )
    def test_training_equals_that_without_those_tokens(
        self,
        estimator: str,
        overrides: list[str],
        new_model: Fixture,
        new_actor: Fixture,
        new_groups: Fixture,
        sampled_by: Fixture,
        gradients_of: Fixture,
    ) -> None:
        keys = [
            f"algorithm.adv_estimator={estimator}",
            "actor.ppo_mini_batch_size=2",
            "actor.ppo_max_token_len_per_gpu=90",
            *overrides,
        ]
        groups = self.aged(sampled_by(new_model(), new_groups(4, 3), noise=0.3))
        masked, row = gradients_of(new_actor(*keys), Batch(0, 1, groups, min_version=1))
        without = copy.deepcopy(groups)
        for branch in (b for group in without for trajectory in group.trajectories for b in trajectory.branches):
            branch.loss_mask[(branch.loss_mask == 1) & (branch.versions == 0)] = 0
        expected, expected_row = gradients_of(new_actor(*keys), Batch(0, 1, without))
        for mine, theirs in zip(masked, expected, strict=True):
            assert_gradients_agree(mine, theirs)
        for name, value in expected_row.items():
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    def test_an_episode_that_is_too_old_altogether_stays_in_the_statistics_of_its_group(
        self, new_actor: Fixture, new_groups: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from agentrl.trainer import actor as actor_module

        seen: list[torch.Tensor] = []
        original = actor_module.policy_loss

        def keep(*args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["advantages"][kwargs["mask"] != 0].unique())
            return original(*args, **kwargs)

        monkeypatch.setattr(actor_module, "policy_loss", keep)
        groups = new_groups(1, 3)
        for trajectory in groups[0].trajectories:
            for branch in trajectory.branches:
                branch.versions[branch.loss_mask == 1] = 0 if trajectory is groups[0].trajectories[0] else 1
        actor = new_actor("algorithm.norm_adv_by_std_in_grpo=false")
        actor.update(Batch(0, 1, groups, min_version=1))
        (advantages,) = seen
        assert advantages.tolist() == pytest.approx([-1 / 3]), "rewards 1, 0, 0: the first is not trained, but counts"

    def test_a_mini_batch_with_nothing_left_is_skipped_and_counted(
        self, new_actor: Fixture, new_groups: Fixture
    ) -> None:
        groups = new_groups(2, 3)
        for branch in (b for trajectory in groups[1].trajectories for b in trajectory.branches):
            branch.versions[branch.loss_mask == 1] = 1
        actor = new_actor("actor.ppo_mini_batch_size=1", "actor.optim.lr=0.01")
        before = weights_of(actor)
        row = actor.update(Batch(0, 1, groups, min_version=1))
        assert row["actor/skipped_steps"] == 1 and row["actor/grad_norm"] > 0
        assert moved(actor, before)
        assert all(np.isfinite(value) for value in row.values())

    @pytest.mark.parametrize("proximal", ["recompute", "bypass"])
    def test_a_batch_with_nothing_left_moves_nothing(
        self, proximal: str, new_actor: Fixture, new_groups: Fixture
    ) -> None:
        actor = new_actor(f"actor.proximal={proximal}", "actor.ppo_mini_batch_size=1", "actor.optim.weight_decay=0.1")
        before = weights_of(actor)
        row = actor.update(Batch(0, 1, new_groups(2, 3), min_version=1))
        assert row["actor/loss"] == 0 and row["actor/skipped_steps"] == 2 and row["tokens/packed"] == 0
        assert not moved(actor, before)
