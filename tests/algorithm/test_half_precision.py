"""Half-precision inputs: long sequences and late versions come out as in double precision from the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithm import (
    Layout,
    LossConfig,
    RolloutCorrectionConfig,
    aggregate,
    kl_penalty,
    policy_loss,
    proximal_logp,
    rollout_correction,
    value_loss,
)
from agentrl.config.names import CHOOSE_TOKENS, LOSS_MODES, SEQUENCE_MEANS

TOKENS = 1500
LOSSES = sorted(set(LOSS_MODES) - set(CHOOSE_TOKENS))
"""Those that draw tokens by rank may draw others after rounding."""


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two sequences of numbers that half precision can hold, in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    behav = -torch.rand(2, TOKENS, generator=generator)
    drift = 0.02 * torch.randn(2, TOKENS, generator=generator)
    values = {"behav_logp": behav, "prox_logp": behav + drift, "logp": behav + 2 * drift, "advantages": drift.sign()}
    return {name: value.bfloat16().to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_a_loss_sums_in_more_than_half(loss_mode):
    config = LossConfig(
        loss_agg_mode="seq-mean-token-mean" if loss_mode in SEQUENCE_MEANS else "token-mean", dro_beta=0.5
    )
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        mask = torch.ones(2, TOKENS)
        batch: Any = inputs(dtype)
        batch["logp"].requires_grad_()
        loss, _ = policy_loss(loss_mode, **batch, mask=mask, config=config)
        loss.backward()
        results.append((loss.double(), batch["logp"].grad))
    (expected, gradient), (loss, half) = results
    assert gradient is not None and half is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert torch.allclose(half.double(), gradient, rtol=1e-2, atol=1e-9), "rounded once, to the type of the log-probs"


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "sequence", "rollout_is_threshold": 100.0},
        {"rollout_is": "token"},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
        {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.295},
    ],
)
def test_the_correction_sums_in_more_than_half(settings: dict[str, Any]):
    config = RolloutCorrectionConfig(**settings)
    double, half = (
        rollout_correction(
            prox_logp=batch["prox_logp"], behav_logp=batch["behav_logp"], mask=torch.ones(2, TOKENS), config=config
        )
        for batch in (inputs(torch.float64), inputs(torch.bfloat16))
    )
    assert torch.equal(double.mask, half.mask)
    assert double.weights is not None and half.weights is not None
    assert torch.allclose(half.weights.double(), double.weights, rtol=1e-3)


def test_values_are_averaged_in_more_than_half():
    half = inputs(torch.bfloat16)
    mask, layout = torch.ones(2, TOKENS), Layout.rows(torch.ones(2, TOKENS))
    for mode in ("token-mean", "seq-mean-token-mean", "episode-mean", "token-sum"):
        expected = aggregate(half["logp"].double(), mask, mode, layout=layout)
        assert aggregate(half["logp"], mask, mode, layout=layout).item() == pytest.approx(expected.item(), rel=1e-5)
    arguments = {"mask": mask, "cliprange_value": 0.5, "loss_agg_mode": "token-mean"}
    names = {"values": "logp", "old_values": "prox_logp", "returns": "advantages"}
    wide, narrow = (
        value_loss(**{name: half[key].to(dtype) for name, key in names.items()}, **arguments)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)
    divergence = kl_penalty(half["logp"], half["behav_logp"], "k3")
    expected = kl_penalty(half["logp"].double(), half["behav_logp"].double(), "k3")
    assert torch.allclose(divergence.double(), expected, rtol=1e-3, atol=1e-7)


def test_versions_that_half_precision_can_not_tell_apart_are():
    logp, behav = torch.zeros(1, 2).bfloat16(), torch.full((1, 2), -1.0).bfloat16()
    versions = torch.tensor([[1001, 1003]])
    result = proximal_logp(
        "loglinear", logp=logp, behav_logp=behav, versions=versions, version_prox=1004, version_now=1005
    )
    assert result[0].tolist() == pytest.approx([-0.25, -0.5])
