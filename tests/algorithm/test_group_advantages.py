"""The estimators that compare a group's outcomes, against their definitions."""

import statistics

import pytest
import torch

from agentrl.algorithm import AdvantageConfig, Layout, compute_advantages


def row_values(estimator, scores, groups, lengths=None, parts=None, **config) -> list[float]:
    """The advantage of each row's first token; rows of `lengths` trained tokens, the score on the last."""
    lengths = lengths or [3] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()
    ends = torch.tensor(lengths)[:, None] - 1

    def placed(values) -> torch.Tensor:
        return torch.zeros_like(mask).scatter(1, ends, torch.tensor(values, dtype=torch.float64)[:, None])

    result, returns = compute_advantages(
        estimator,
        token_rewards=placed(scores),
        mask=mask,
        layout=Layout.rows(mask, group=groups),
        config=AdvantageConfig(**config),
        reward_parts={name: placed(values) for name, values in (parts or {}).items()},
    )
    assert torch.equal(result, result[:, :1] * mask) and torch.equal(returns, result)
    return result[:, 0].tolist()


@pytest.mark.parametrize("by_std", [True, False])
def test_pass_at_k_credits_the_best_by_its_lead(by_std):
    scores = [0.1, 0.9, 0.5, 1.0, 1.0, 0.0]
    scale = statistics.stdev(scores[:3]) + 1e-6 if by_std else 1.0
    result = row_values("grpo_passk", scores, [0, 0, 0, 1, 1, 1], norm_adv_by_std_in_grpo=by_std)
    assert result == pytest.approx([0, 0.4 / scale, 0, 0, 0, 0])


def test_the_best_of_negative_scores_is_found():
    result = row_values("grpo_passk", [-3.0, -1.0, -1.5], [4, 4, 4], norm_adv_by_std_in_grpo=False)
    assert result == pytest.approx([0, 0.5, 0])


def test_opo_weighs_the_baseline_by_length():
    result = row_values("opo", [1.0, 0.0, 0.5], [0, 0, 0], lengths=[1, 4, 5])
    baseline = (1 * 1.0 + 4 * 0.0 + 5 * 0.5) / 10
    assert result == pytest.approx([1 - baseline, -baseline, 0.5 - baseline])


def test_gpg_makes_up_for_episodes_without_reward():
    result = row_values("gpg", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1, 1])
    assert result == pytest.approx([2 * x for x in (2 / 3, -1 / 3, -1 / 3, -2 / 3, 1 / 3, 1 / 3)])


def test_gdpo_normalises_each_part_of_the_reward():
    parts = {"answer": [1.0, 0.0, 0.0, 1.0], "format": [10.0, 20.0, 10.0, 20.0]}
    total = [
        sum(
            weight * (values[i] - statistics.mean(values)) / (statistics.stdev(values) + 1e-6)
            for weight, values in zip((1.0, 0.5), parts.values(), strict=True)
        )
        for i in range(4)
    ]
    tokens = [x for x in total for _ in range(3)]
    expected = [(x - statistics.mean(tokens)) / statistics.stdev(tokens) for x in total]
    keys = {"gdpo_reward_keys": ("answer", "format"), "gdpo_reward_weights": (1.0, 0.5)}
    assert row_values("gdpo", [0.0] * 4, [0] * 4, parts=parts, **keys) == pytest.approx(expected, rel=1e-6)


def test_gdpo_takes_all_parts_there_are():
    parts = {"format": [1.0, 0.0], "answer": [0.0, 1.0]}
    assert row_values("gdpo", [0.0, 0.0], [0, 0], parts=parts) == [0, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gdpo_reward_keys": ("style",)}, "no reward part style: the episodes' rewards have answer"),
        ({"gdpo_reward_weights": (1.0, 2.0)}, "2 numbers for 1 parts"),
    ],
)
def test_gdpo_says_which_part_is_missing(config, message):
    with pytest.raises(ValueError, match=message):
        row_values("gdpo", [0.0, 0.0], [0, 0], parts={"answer": [0.0, 1.0]}, **config)


def test_without_any_part_gdpo_has_nothing_to_compare():
    with pytest.raises(ValueError, match="no reward part at all"):
        row_values("gdpo", [0.0, 0.0], [0, 0])
