"""Advantages against plain Python and against the numbers that must hold."""

import statistics
from itertools import chain

import pytest
import torch

from agentrl.algorithm import AdvantageConfig, Layout, UnknownNameError, compute_advantages, group_scores

GROUP_ESTIMATORS = ["grpo", "gdpo", "gpg", "opo", "rloo", "reinforce_plus_plus_baseline"]
OPTIMAL_BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]
ESTIMATORS = [*GROUP_ESTIMATORS, *OPTIMAL_BASELINES, "grpo_passk", "reinforce_plus_plus", "gae", "remax"]


def advantages(estimator, rewards, mask, layout, **config) -> torch.Tensor:
    """With a critic that knows nothing, a greedy reward of 0 and a single part of the reward."""
    values = torch.where(mask > 0, torch.zeros_like(rewards), torch.nan)
    result, _ = compute_advantages(
        estimator,
        token_rewards=rewards,
        mask=mask,
        layout=layout,
        config=AdvantageConfig(**config),
        values=values if estimator == "gae" else None,
        logp=values - 1 if estimator in OPTIMAL_BASELINES else None,
        sum_pi_squared=values + 0.5 if estimator in OPTIMAL_BASELINES else None,
        baselines=torch.zeros(layout.sequences) if estimator == "remax" else None,
        reward_parts={"answer": rewards} if estimator == "gdpo" else None,
    )
    return result


def outcomes(scores, dtype=torch.float32, length=3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `length` trained tokens with the score on the last one."""
    rewards = torch.zeros(len(scores), length, dtype=dtype)
    rewards[:, -1] = torch.tensor(scores, dtype=dtype)
    return rewards, torch.ones_like(rewards)


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "grpo_passk", "reinforce_plus_plus", "gae"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 0.0, 1.0])
def test_equal_rewards_give_exactly_zero(estimator, dtype, reward):
    for members in (2, 3, 7, 8):
        rewards, mask = outcomes([reward] * members, dtype)
        result = advantages(estimator, rewards, mask, Layout.rows(mask, group=[0] * members))
        assert torch.equal(result, torch.zeros_like(result))


def test_equal_rewards_stay_exact_when_episodes_have_different_numbers_of_branches():
    rewards, mask = outcomes([0.1] * 6, torch.float64)
    layout = Layout.rows(mask, group=[0] * 6, episode=[0, 0, 0, 1, 2, 2])
    assert not advantages("grpo", rewards, mask, layout).any()


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_is_its_definition(by_std):
    groups = {0: [1.0, 0.0, 0.25], 1: [0.5, -1.0], 2: [2.0, 2.0, 0.0, 1.0]}
    expected = []
    for scores in groups.values():
        scale = statistics.stdev(scores) + 1e-6 if by_std else 1.0
        expected += [(score - statistics.mean(scores)) / scale for score in scores]
    rewards, mask = outcomes(list(chain(*groups.values())), torch.float64)
    layout = Layout.rows(mask, group=[group for group, scores in groups.items() for _ in scores])
    result = advantages("grpo", rewards, mask, layout, norm_adv_by_std_in_grpo=by_std)
    assert result[:, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(result, result[:, :1].expand_as(result))


def test_leave_one_out():
    rewards, mask = outcomes([0.35] * 7 + [0.0])
    result = advantages("rloo", rewards, mask, Layout.rows(mask, group=[0] * 8))
    assert result[:, 0].tolist() == pytest.approx([0.05] * 7 + [-0.35], rel=1e-6)


def test_a_failed_member_is_in_no_statistic_and_no_row_shifts():
    """The group of the failed member has three rows, the next one four."""
    rewards, mask = outcomes([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], torch.float64)
    layout = Layout.rows(mask, group=[7, 7, 7, 2, 2, 2, 2])
    result = advantages("grpo", rewards, mask, layout, norm_adv_by_std_in_grpo=False)
    third = 1 / 3
    assert result[:, 0].tolist() == pytest.approx([1 - third, -third, -third, 0.5, 0.5, -0.5, -0.5])


def test_a_member_without_trained_tokens_is_in_no_statistic():
    rewards, mask = outcomes([1.0, 0.0, 0.0, 5.0], torch.float64)
    mask[3] = 0
    scores = group_scores(rewards, mask, Layout.rows(mask, group=[0] * 4))
    assert scores.mean[0].item() == pytest.approx(1 / 3)
    assert scores.size.tolist() == [3] * 4


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, *OPTIMAL_BASELINES, "grpo_passk"])
def test_a_singleton_has_no_baseline_and_weight_zero(estimator):
    rewards, mask = outcomes([1.0, 1.0, 0.0], torch.float64)
    layout = Layout.rows(mask, group=[0, 1, 1])
    result = advantages(estimator, rewards, mask, layout)
    assert not result[0].any() and result[1:].any()
    assert group_scores(rewards, mask, layout).has_baseline.tolist() == [False, True, True]


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_estimators_without_a_group_train_singletons(estimator):
    rewards, mask = outcomes([1.0, 0.25], torch.float64)
    assert advantages(estimator, rewards, mask, Layout.rows(mask)).all()


def test_an_episode_counts_once_however_many_branches_it_has():
    branched, branched_mask = outcomes([1.0, 1.0, 1.0, 0.0, 0.5], torch.float64)
    single, single_mask = outcomes([1.0, 0.0, 0.5], torch.float64)
    layout = Layout.rows(branched_mask, group=[0] * 5, episode=[3, 3, 3, 1, 2])
    result = advantages("grpo", branched, branched_mask, layout)
    expected = advantages("grpo", single, single_mask, Layout.rows(single_mask, group=[0] * 3))
    torch.testing.assert_close(result, expected[[0, 0, 0, 1, 2]])


def test_reinforce_plus_plus_is_its_definition():
    """Masked tokens take no time: the discount counts trained tokens, and what sits on them is not read."""
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]])
    rewards = torch.tensor([[9.0, 1.0, 0.0, 9.0, 9.0, 4.0], [2.0, 9.0, 9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    returns = [1 + 0.25 * 4, 0.5 * 4, 4.0, 2.0]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    result, result_returns = compute_advantages(
        "reinforce_plus_plus",
        token_rewards=rewards,
        mask=mask,
        layout=Layout.rows(mask),
        config=AdvantageConfig(gamma=0.5),
    )
    assert result_returns[mask.bool()].tolist() == pytest.approx(returns)
    assert result[mask.bool()].tolist() == pytest.approx([(r - mean) / std for r in returns], rel=1e-6)
    assert not result[mask == 0].any() and not result_returns[mask == 0].any()


def test_reinforce_plus_plus_baseline_is_its_definition():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    per_token = [0.5, 0.5, 0.5, -0.5]
    mean, std = statistics.mean(per_token), statistics.stdev(per_token)
    result = advantages("reinforce_plus_plus_baseline", rewards, mask, Layout.rows(mask, group=[0, 0]))
    assert result[mask.bool()].tolist() == pytest.approx([(x - mean) / std for x in per_token], rel=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_rewards_are_not_read(estimator):
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0]])
    clean = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    layout = Layout.rows(mask, group=[0, 0, 0])
    expected = advantages(estimator, clean, mask, layout)
    for junk in (torch.nan, torch.inf, -200.0):
        result = advantages(estimator, torch.where(mask > 0, clean, junk), mask, layout)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "reinforce_plus_plus", "gae", "remax"])
def test_as_many_advantages_as_trained_tokens_none_shifted(estimator):
    """Tokens [P, R1, R2] and a one-token response: each trained token has its own advantage."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    rewards = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.25, 0.0]])
    result = advantages(estimator, rewards, mask, Layout.rows(mask, group=[0, 0]))
    assert ((result != 0) == (mask > 0)).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_masked_gives_zeros(estimator):
    rewards, mask = outcomes([1.0, 0.0])
    assert not advantages(estimator, rewards, mask * 0, Layout.rows(mask, group=[0, 0])).any()


def test_errors_name_what_is_wrong():
    rewards, mask = outcomes([1.0, 0.0])
    layout = Layout.rows(mask)
    with pytest.raises(UnknownNameError, match=r"adv_estimator 'grop'.*grpo.*rloo"):
        advantages("grop", rewards, mask, layout)
    with pytest.raises(ValueError, match="sequences of one episode"):
        advantages("grpo", rewards, mask, Layout.rows(mask, group=[0, 1], episode=[0, 0]))
    with pytest.raises(ValueError, match="pass floats"):
        advantages("grpo", rewards.long(), mask, layout)
    with pytest.raises(ValueError, match="values has shape"):
        compute_advantages(
            "grpo",
            token_rewards=rewards,
            mask=mask,
            layout=layout,
            config=AdvantageConfig(),
            values=rewards[:, 1:],
        )
    with pytest.raises(ValueError, match="gamma is 2"):
        AdvantageConfig(gamma=2)
    with pytest.raises(ValueError, match="lam is -1"):
        AdvantageConfig(lam=-1)
    with pytest.raises(ValueError, match="gae_timestep is 'step'"):
        AdvantageConfig(gae_timestep="step")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("estimator", "missing"),
    [
        ("gae", "values"),
        ("remax", "baselines"),
        ("gdpo", "reward_parts"),
        ("optimal_token_baseline", "logp"),
        ("tir_optimal_token_baseline", "logp"),
    ],
)
def test_an_estimator_says_what_it_needs(estimator, missing):
    rewards, mask = outcomes([1.0, 0.0])
    with pytest.raises(ValueError, match=f"adv_estimator {estimator} needs {missing}"):
        compute_advantages(
            estimator, token_rewards=rewards, mask=mask, layout=Layout.rows(mask), config=AdvantageConfig()
        )
