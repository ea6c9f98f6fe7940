"""Pairs merged over calls give what one call over everything gives."""

import pytest
import torch

from agentrl.algorithm import RolloutCorrectionConfig, merge, rollout_correction, summarise
from agentrl.algorithm.metrics import max_pair, mean_pair


def test_merging_calls_is_one_call():
    generator = torch.Generator().manual_seed(3)
    prox, behav = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 5, generator=generator) > 0.4).double()
    config = RolloutCorrectionConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.5)  # type: ignore[arg-type]

    def metrics(rows: slice):
        return rollout_correction(prox_logp=prox[rows], behav_logp=behav[rows], mask=mask[rows], config=config).metrics

    parts = [metrics(slice(0, 1)), metrics(slice(1, 4)), metrics(slice(4, 6))]
    assert summarise(merge(parts)) == pytest.approx(summarise(metrics(slice(0, 6))), rel=1e-6)


def test_pairs_without_tokens_are_left_out():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    values = torch.full((1, 2), torch.nan)
    pairs = {"a": mean_pair(values, nothing), "mismatch/max": max_pair(values, nothing)}
    assert summarise(pairs) == {}
    everything = torch.ones(1, 2, dtype=torch.bool)
    other = {"mismatch/max": max_pair(torch.tensor([[1.0, 3.0]]), everything)}
    assert summarise(merge([pairs, other, other])) == {"mismatch/max": 3.0}
    assert summarise({}) == {}


def test_sums_are_wider_than_half():
    total, count = mean_pair(torch.ones(1, 3000, dtype=torch.bfloat16), torch.ones(1, 3000, dtype=torch.bool))
    assert (total.item(), count.item()) == (3000, 3000)
