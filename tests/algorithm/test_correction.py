"""Importance weights and rejection: values, bounds on r, clamps, masks."""

import math
from typing import get_args

import pytest
import torch

from agentrl.algorithm import Correction, Layout, RolloutCorrectionConfig, rollout_correction, summarise
from agentrl.config.correction import RejectionStatistic


def correct(log_ratios, mask=None, layout=None, **config) -> Correction:
    """The correction of rows whose l = prox - behav is `log_ratios`."""
    behav = torch.full_like(torch.tensor(log_ratios, dtype=torch.float64), -1.0)
    prox = behav + torch.tensor(log_ratios, dtype=torch.float64)
    return rollout_correction(
        prox_logp=prox,
        behav_logp=behav,
        mask=torch.ones_like(prox) if mask is None else torch.tensor(mask),
        config=RolloutCorrectionConfig.model_validate(config),
        layout=layout,
    )


def weights(*args, **kwargs) -> list[list[float]]:
    result = correct(*args, **kwargs).weights
    assert result is not None
    return result.tolist()


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def test_token_weights_are_truncated_at_two_by_default():
    assert weights([logs(0.25, 1.0, 1.5, 4.0)])[0] == pytest.approx([0.25, 1.0, 1.5, 2.0])


def test_sequence_weights_are_the_product_of_the_trained_tokens():
    result = weights([logs(2.0, 100.0, 0.75)], mask=[[1, 0, 1]], rollout_is="sequence")
    assert result[0] == pytest.approx([1.5, 0, 1.5])


def test_a_band_zeroes_weights_without_rejecting():
    result = correct([logs(0.25, 0.75, 4.0, 8.0)], rollout_is_threshold="0.5_5.0")
    assert result.weights is not None
    assert result.weights[0].tolist() == pytest.approx([0, 0.75, 4.0, 0])
    assert result.mask.all()
    assert summarise(result.metrics)["mismatch/truncated_fraction"] == 0.5


def test_weights_are_clamped_after_the_sum_and_statistics_before():
    """Two tokens of +30 and -25 nats: the weight is exp(5), but each counts as 20 in a rejection sum."""
    pair = [[30.0, -25.0]]
    assert weights(pair, rollout_is="sequence", rollout_is_threshold=1e9)[0] == pytest.approx([math.exp(5)] * 2)
    assert correct(pair, rollout_rs="seq_sum_k1", rollout_rs_threshold=[0.99, 1.01]).mask.all()
    assert weights([[50.0]], rollout_is_threshold=1e9)[0] == pytest.approx([math.exp(20)])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalisation_makes_the_mean_one(level):
    rows, mask = [logs(0.5, 1.0, 1.5), logs(1.2, 1.0, 1.0)], [[1, 1, 0], [1, 0, 0]]
    result = torch.tensor(weights(rows, mask=mask, rollout_is=level, rollout_is_batch_normalize=True))
    per_item = result[torch.tensor(mask) > 0] if level == "token" else result[:, 0]
    assert per_item.mean().item() == pytest.approx(1)
    nothing = weights([logs(9.0)], rollout_is_threshold=[0.5, 2.0], rollout_is_batch_normalize=True)
    assert nothing == [[0.0]]


def test_no_weights_without_rollout_is_but_metrics_all_the_same():
    result = correct([logs(0.5, 4.0)], rollout_is=None)
    assert result.weights is None
    metrics = summarise(result.metrics)
    assert metrics["mismatch/ess"] == pytest.approx((0.5 + 4) ** 2 / (2 * (0.25 + 16)))
    assert metrics["mismatch/truncated_fraction"] == 0


def test_k1_bounds_are_on_r():
    """verl's `token_k1 "0.5_5.0"` keeps r = 0.25 and rejects r = 4; here it is the other way round."""
    kept = correct([logs(0.25, 4.0)], rollout_rs="token_k1", rollout_rs_threshold=[0.5, 5.0]).mask
    assert kept.tolist() == [[0, 1]]


STATISTICS = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio * log_ratio / 2,
    "k3": lambda log_ratio: math.exp(log_ratio) - 1 - log_ratio,
}


@pytest.mark.parametrize("name", get_args(RejectionStatistic))
def test_each_statistic_is_its_definition(name):
    generator = torch.Generator().manual_seed(5)
    rows = (torch.randn(12, 4, generator=generator, dtype=torch.float64) * 0.7).tolist()
    mask = (torch.rand(12, 4, generator=generator) > 0.3).int().tolist()
    scope, _, kind = name.rpartition("_")
    reduce = {"seq_sum": sum, "seq_mean": lambda x: sum(x) / len(x), "seq_max": max}
    bound = [0.6, 1.7] if kind == "k1" else 0.4
    lower, upper = (math.log(0.6), math.log(1.7)) if kind == "k1" else (-math.inf, 0.4)
    expected = []
    for row, trained in zip(rows, mask, strict=True):
        values = [STATISTICS[kind](log_ratio) for log_ratio in row]
        if scope != "token":
            kept = [value for value, m in zip(values, trained, strict=True) if m]
            values = [reduce[scope](kept) if kept else 0.0] * len(row)
        expected.append([int(m and lower <= value <= upper) for value, m in zip(values, trained, strict=True)])
    assert 0 < sum(map(sum, expected)) < sum(map(sum, mask))
    result = correct(rows, mask=mask, rollout_rs=name, rollout_rs_threshold=bound)
    assert result.mask.tolist() == expected
    rejected = 1 - sum(map(sum, expected)) / sum(map(sum, mask))
    assert summarise(result.metrics)["mismatch/rejected_fraction"] == pytest.approx(rejected)


def test_all_statistics_must_hold():
    rows = [logs(1.0, 3.0), logs(1.0, 1.0), logs(0.1, 0.1)]
    result = correct(rows, rollout_rs=["token_k1", "seq_sum_k1"], rollout_rs_threshold=[[0.5, 2.0], [0.5, 4.0]])
    assert result.mask.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert summarise(result.metrics)["mismatch/rejected_sequence_fraction"] == pytest.approx(2 / 3)


def test_metrics_are_their_definitions():
    rows, mask = [logs(0.5, 2.0, 9.0), logs(1.5, 9.0, 9.0)], [[1, 1, 0], [1, 0, 0]]
    metrics = summarise(correct(rows, mask=mask).metrics)
    ratios, sequences = [0.5, 2.0, 1.5], [1.0, 1.5]
    assert metrics == pytest.approx(
        {
            "mismatch/kl": -sum(map(math.log, ratios)) / 3,
            "mismatch/k3": sum(r - 1 - math.log(r) for r in ratios) / 3,
            "mismatch/max": math.log(2),
            "mismatch/chi2_token": sum(r * r - 1 for r in ratios) / 3,
            "mismatch/chi2_seq": sum(r * r - 1 for r in sequences) / 2,
            "mismatch/ppl_ratio": (1 + 1 / 1.5) / 2,
            "mismatch/weight": 4 / 3,
            "mismatch/weight_squared": (0.25 + 4 + 2.25) / 3,
            "mismatch/ess": 16 / (3 * 6.5),
            "mismatch/truncated_fraction": 0,
            "mismatch/rejected_fraction": 0,
            "mismatch/rejected_sequence_fraction": 0,
        }
    )


@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("junk", [-200.0, -torch.inf, torch.inf, torch.nan])
def test_masked_values_change_nothing(level, junk):
    mask, prox, behav = torch.tensor([[1, 0, 1]]), torch.tensor([[-1.0, -2, -3]]), torch.tensor([[-1.5, -2, -2]])
    config = RolloutCorrectionConfig.model_validate(
        {"rollout_is": level, "rollout_rs": "seq_mean_k3,seq_max_k2", "rollout_rs_threshold": 0.2}
    )
    clean = rollout_correction(prox_logp=prox, behav_logp=behav, mask=mask, config=config)
    dirty_behav = torch.where(mask > 0, behav, junk)
    for dirty_prox in (prox, torch.where(mask > 0, prox, junk)):
        dirty = rollout_correction(prox_logp=dirty_prox, behav_logp=dirty_behav, mask=mask, config=config)
        assert torch.equal(dirty.mask, clean.mask)
        assert summarise(dirty.metrics) == summarise(clean.metrics)
        if dirty.weights is not None and clean.weights is not None:
            assert torch.equal(dirty.weights, clean.weights)


def test_packed_rows_keep_sequences_apart():
    padded = correct([logs(1.5, 1.2), logs(0.5, 0.9)], rollout_is="sequence")
    layout = Layout(torch.tensor([[1, 1, 0, 0]]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    packed = correct([logs(0.5, 0.9, 1.5, 1.2)], layout=layout, rollout_is="sequence")
    assert padded.weights is not None and packed.weights is not None
    assert packed.weights[0].tolist() == pytest.approx([*padded.weights[1].tolist(), *padded.weights[0].tolist()])
    assert summarise(packed.metrics) == pytest.approx(summarise(padded.metrics))


def test_nothing_carries_a_gradient():
    prox = torch.tensor([[-1.0]], requires_grad=True)
    result = rollout_correction(
        prox_logp=prox, behav_logp=torch.tensor([[-1.5]]), mask=torch.ones(1, 1), config=RolloutCorrectionConfig()
    )
    assert result.weights is not None and not result.weights.requires_grad


def test_all_masked_is_quiet():
    result = correct([logs(2.0)], mask=[[0]], rollout_is_batch_normalize=True)
    assert result.weights is not None and not result.weights.any() and not result.mask.any()
    assert summarise(result.metrics) == {}


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_the_mask_keeps_its_dtype(kind):
    ones = torch.ones(1, 2)
    config = RolloutCorrectionConfig.model_validate({"rollout_rs": "token_k2", "rollout_rs_threshold": 1})
    result = rollout_correction(prox_logp=ones, behav_logp=ones, mask=ones.to(kind), config=config)
    assert result.mask.dtype == kind and result.mask.all()


@pytest.mark.parametrize(
    ("threshold", "kept"), [(2.0, [1, 1, 1, 1]), (0.5, [1, 0, 1, 1]), (0.2, [1, 0, 1, 0]), (1e-9, [1, 0, 0, 0])]
)
def test_the_second_moment_is_brought_below_its_threshold(threshold, kept):
    """Squares 0.01, 4, 0.25 and 1; the smallest two have a mean of 0.13, three of 0.42, all of 1.315."""
    log_ratio = torch.tensor([[0.1, 2.0, 0.5, -1.0, torch.nan]], dtype=torch.float64)
    result = rollout_correction(
        prox_logp=log_ratio,
        behav_logp=torch.zeros_like(log_ratio),
        mask=torch.tensor([[1, 1, 1, 1, 0]]),
        config=RolloutCorrectionConfig.model_validate({"rollout_is": None, "m2_threshold": threshold}),
    )
    assert result.mask.tolist() == [[*kept, 0]]
    rejected, count = result.metrics["mismatch/rejected_fraction"]
    assert (rejected / count).item() == pytest.approx(1 - sum(kept) / 4)
