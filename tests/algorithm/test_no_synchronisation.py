"""What runs per micro-batch never asks the device for a number: tensors without storage have none to give."""

import pytest
import torch

from agentrl.algorithm import (
    Layout,
    LossConfig,
    RolloutCorrectionConfig,
    Totals,
    kl_penalty,
    merge,
    policy_loss,
    proximal_logp,
    rollout_correction,
    value_loss,
)
from agentrl.algorithm.aggregate import AGGREGATIONS
from agentrl.config.names import CHOOSE_TOKENS, LOSS_MODES, SEQUENCE_MEANS

SHAPE = (3, 8)


CASES = [("vanilla", mode) for mode in AGGREGATIONS.names()] + [
    (loss, "seq-mean-token-mean" if loss in SEQUENCE_MEANS else "token-mean")
    for loss in LOSS_MODES
    if loss not in ("vanilla", *CHOOSE_TOKENS)
]


@pytest.mark.parametrize(("loss_mode", "mode"), CASES)
@pytest.mark.parametrize("with_totals", [True, False])
def test_a_micro_batch_runs_without_reading_a_value(loss_mode, mode, with_totals):
    logp, behav, advantages, mask = (torch.rand(SHAPE, device="meta") for _ in range(4))
    logp.requires_grad_()
    owners = torch.zeros(5, dtype=torch.long, device="meta")
    weight = torch.rand(5, device="meta")
    layout = Layout(torch.zeros(SHAPE, dtype=torch.long, device="meta"), owners, owners, weight=weight)
    prox = proximal_logp(
        "loglinear",
        logp=logp,
        behav_logp=behav,
        versions=torch.zeros(SHAPE, dtype=torch.long, device="meta"),
        version_prox=1,
        version_now=2,
    )
    config = RolloutCorrectionConfig.model_validate(
        {
            "rollout_is": "sequence",
            "rollout_is_batch_normalize": True,
            "rollout_rs": ["token_k1", "seq_mean_k3", "seq_max_k2"],
            "rollout_rs_threshold": 2.0,
        }
    )
    correction = rollout_correction(prox_logp=prox, behav_logp=behav, mask=mask, config=config, layout=layout)
    loss, metrics = policy_loss(
        loss_mode,
        logp=logp,
        prox_logp=prox,
        behav_logp=behav,
        advantages=advantages - kl_penalty(logp, behav, "k3+").detach(),
        mask=mask,
        config=LossConfig(loss_agg_mode=mode, dro_beta=0.5),
        layout=layout,
        correction=correction,
        totals=Totals.count(mask, layout) if with_totals else None,
    )
    values, value_metrics = value_loss(
        values=logp, old_values=behav, returns=advantages, mask=mask, cliprange_value=0.5, layout=layout
    )
    (loss + values).backward()
    merge([metrics, correction.metrics, metrics, value_metrics])
    assert logp.grad is not None
