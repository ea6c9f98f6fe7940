"""Where agentrl means something else than verl 0.9.1: what verl does, what agentrl does, and that they differ.

The reasons stand in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from agentrl.algorithm import (
    AdvantageConfig,
    Correction,
    Layout,
    LossConfig,
    RolloutCorrectionConfig,
    compute_advantages,
    policy_loss,
    rollout_correction,
)
from tests.parity.test_verl import verl_config


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def their_advantages(estimator: str, rewards: torch.Tensor, groups: list[int], **takes: Any) -> list[float]:
    mask = torch.ones_like(rewards)
    result, _ = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards.clone(), response_mask=mask, index=np.array(groups), **takes
    )
    return result[:, 0].tolist()


def our_advantages(estimator: str, rewards: torch.Tensor, groups: list[int]) -> list[float]:
    mask = torch.ones_like(rewards)
    result, _ = compute_advantages(
        estimator,
        token_rewards=rewards,
        mask=mask,
        layout=Layout.rows(mask, group=groups),
        config=AdvantageConfig(),
    )
    return result[:, 0].tolist()


def test_a_k1_band_bounds_the_ratio_here_and_its_inverse_there() -> None:
    ratios = row(0.25, 4.0).log()
    _, theirs, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=ratios - 1,
        rollout_log_prob=row(-1, -1),
        response_mask=row(1, 1),
        rollout_rs="token_k1",
        rollout_rs_threshold="0.5_5.0",
    )
    assert theirs.tolist() == [[1, 0]]
    with pytest.warns(UserWarning, match="1 / r in verl"):
        config = RolloutCorrectionConfig.model_validate({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"})
    ours = rollout_correction(prox_logp=ratios - 1, behav_logp=row(-1, -1), mask=row(1, 1), config=config)
    assert ours.mask.tolist() == [[0, 1]]


def our_vanilla(logp: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The loss at a ratio and advantages of 1, of two trained tokens, where rejection left `kept`."""
    loss, _ = policy_loss(
        "vanilla",
        logp=logp,
        prox_logp=logp,
        behav_logp=logp,
        advantages=row(1, 1),
        mask=row(1, 1),
        config=LossConfig(),
        correction=Correction(None, kept, {}),
    )
    return loss


def test_a_batch_that_is_rejected_as_a_whole_is_zero_here_and_not_a_number_there() -> None:
    x, nothing = row(-1.0, -1.0), row(0, 0)
    loss, _ = core_algos.compute_policy_loss_vanilla(x, x, row(1, 1), nothing, config=verl_config("vanilla"))
    assert loss.isnan()
    ours = our_vanilla(x, nothing)
    assert ours.item() == 0


def test_rejection_leaves_the_denominator_alone_here_and_shrinks_it_there() -> None:
    x, kept = row(-1.0, -1.0), row(1, 0)
    theirs, _ = core_algos.compute_policy_loss_vanilla(x, x, row(1, 1), kept, config=verl_config("vanilla"))
    ours = our_vanilla(x, kept)
    assert theirs.item() == pytest.approx(-1) and ours.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("estimator", ["grpo", "opo", "rloo", "gpg"])
def test_a_singleton_keeps_its_score_there_and_weighs_nothing_here(estimator: str) -> None:
    rewards = torch.tensor([[0.75], [1.0], [0.0]], dtype=torch.float64)
    first = their_advantages(estimator, rewards, [0, 1, 1])[0]
    assert first == pytest.approx(0.75 * (1.5 if estimator == "gpg" else 1), rel=1e-5)
    assert our_advantages(estimator, rewards, [0, 1, 1])[0] == 0


def test_equal_rewards_leave_a_rest_there_and_none_here() -> None:
    rewards = torch.full((8, 1), 0.3)
    assert max(map(abs, their_advantages("grpo", rewards, [0] * 8))) > 0.02
    assert our_advantages("grpo", rewards, [0] * 8) == [0] * 8


def test_geo_mean_knows_aggregation_here_and_not_there() -> None:
    logp = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    mask, advantages = torch.tensor([[1.0, 1], [1, 0]]), torch.ones_like(logp)
    theirs = [
        core_algos.compute_policy_loss_geo_mean(
            logp, logp, advantages, mask, loss_agg_mode=mode, config=verl_config("geo_mean")
        )[0].item()
        for mode in ("seq-mean-token-mean", "token-sum")
    ]
    assert theirs == pytest.approx([-1, -1])
    ours = [
        policy_loss(
            "geo_mean",
            logp=logp,
            prox_logp=logp,
            behav_logp=logp,
            advantages=advantages,
            mask=mask,
            config=LossConfig(loss_agg_mode=mode),
            correction=Correction(None, mask, {}),
        )[0].item()
        for mode in ("seq-mean-token-mean", "token-sum")
    ]
    assert ours == pytest.approx([-1, -3])


@pytest.mark.parametrize("mode", ["gspo", "sapo"])
def test_a_mean_over_sequences_is_nothing_else_here(mode: str) -> None:
    x = row(-1.0)
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        policy_loss(mode, logp=x, prox_logp=x, behav_logp=x, advantages=x, mask=row(1), config=LossConfig())
    core_algos.get_policy_loss_fn(mode)(x, x, x, row(1), loss_agg_mode="token-mean", config=verl_config(mode))


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_ratios_are_bounded_here_in_every_loss(mode: str) -> None:
    """e^800 is infinite even in double precision."""
    logp, prox = row(-1.0, -1.0), row(-801.0, -1.0)
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        prox, logp, row(-1, -1), row(1, 1), loss_agg_mode="token-mean", config=verl_config(mode)
    )
    assert not loss.isfinite()
    ours, _ = policy_loss(
        mode,
        logp=logp,
        prox_logp=prox,
        behav_logp=prox,
        advantages=row(-1, -1),
        mask=row(1, 1),
        config=LossConfig(),
        correction=Correction(None, row(1, 1), {}),
    )
    assert ours.isfinite()
