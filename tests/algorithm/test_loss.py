"""Policy losses: golden values, a plain Python re-computation, masks and rejection."""

import math
from typing import Any

import pytest
import torch

from agentrl.algorithm import (
    Correction,
    LossConfig,
    RolloutCorrectionConfig,
    Totals,
    UnknownNameError,
    policy_loss,
    rollout_correction,
    summarise,
)
from agentrl.algorithm.loss import SEQUENCE_MEANS
from agentrl.config.names import LOSS_MODES

KINDS = [(mode, "ppo_clip") for mode in LOSS_MODES] + [("bypass_mode", "reinforce")]


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def needed(loss_mode) -> dict[str, Any]:
    """What a loss can't do without."""
    means = {"loss_agg_mode": "seq-mean-token-mean"} if loss_mode in SEQUENCE_MEANS else {}
    return means | ({"dro_beta": 0.5} if loss_mode == "dro" else {})


def evaluate(loss_mode, logp, prox, behav, advantages, mask=None, correction=None, totals=None, **config):
    """(loss, gradient of logp, metrics)."""
    logp = logp.clone().requires_grad_()
    config = needed(loss_mode) | config
    loss, metrics = policy_loss(
        loss_mode,
        logp=logp,
        prox_logp=prox,
        behav_logp=behav,
        advantages=advantages,
        mask=torch.ones_like(logp) if mask is None else mask,
        config=LossConfig(**config),
        correction=correction,
        totals=totals,
    )
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, summarise(metrics)


@pytest.mark.parametrize(
    ("logp", "prox", "behav", "loss", "gradient"),
    [(-1.1, -1.2, -1.5, -1.49182, -1.49182), (-1.0, -1.2, -1.5, -1.61983, 0.0)],
)
@pytest.mark.parametrize("corrected", [True, False])
def test_golden_values_of_decoupled_ppo(logp, prox, behav, loss, gradient, corrected):
    correction = rollout_correction(
        prox_logp=row(prox), behav_logp=row(behav), mask=row(1), config=RolloutCorrectionConfig()
    )
    result = evaluate("vanilla", row(logp), row(prox), row(behav), row(1), correction=correction if corrected else None)
    assert result[0].item() == pytest.approx(loss, rel=1e-5)
    assert result[1].item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("corrected", [True, False])
def test_golden_value_of_bypass_with_reinforce(corrected):
    """The gradient is -w A: the weight is a constant of it."""
    correction = rollout_correction(
        prox_logp=row(-1.0),
        behav_logp=row(-1.5),
        mask=row(1),
        config=RolloutCorrectionConfig.preset("bypass_pg_is"),
    )
    loss, gradient, _ = evaluate(
        "bypass_mode",
        row(-1.0),
        row(torch.nan),
        row(-1.5),
        row(1),
        correction=correction if corrected else None,
        loss_type="reinforce",
    )
    assert loss.item() == pytest.approx(1.64872, rel=1e-5)
    assert gradient.item() == pytest.approx(-1.64872, rel=1e-5)


def test_bypass_with_ppo_clip_takes_no_weight():
    """r = current / behaviour holds the correction already: equal to vanilla anchored at the behaviour."""
    logp, behav, weights = row(-1.0, -2.0), row(-1.1, -1.9), Correction(row(0.1, 0.1), row(1, 1), {})
    bypass = evaluate("bypass_mode", logp, row(0, 0), behav, row(1, -1), correction=weights)
    anchored = evaluate("vanilla", logp, behav, behav, row(1, -1))
    assert torch.equal(bypass[0], anchored[0]) and torch.equal(bypass[1], anchored[1])
    assert bypass[2]["actor/behav_weight_mean"] == 1


def test_a_correction_without_weights_means_no_weight():
    none = Correction(None, row(1), {})
    loss, _, metrics = evaluate("vanilla", row(-1.1), row(-1.2), row(-1.5), row(1), correction=none)
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert metrics["actor/behav_weight_mean"] == 1


def plain_vanilla(logp, prox, weight, advantage, low, high, c) -> tuple[float, float, bool, bool]:
    """(loss, d loss / d logp, clipped, at the dual clip) of one token, by cases."""
    ratio = math.exp(logp - prox)
    if advantage >= 0:
        clipped = ratio > 1 + high
        return (
            -weight * advantage * min(ratio, 1 + high),
            0.0 if clipped else -weight * advantage * ratio,
            clipped,
            False,
        )
    clipped, at_bound = ratio < 1 - low, ratio > c
    loss = -weight * advantage * min(max(ratio, 1 - low), c)
    return loss, 0.0 if clipped or at_bound else -weight * advantage * ratio, clipped, at_bound


def test_vanilla_is_its_definition():
    generator = torch.Generator().manual_seed(2)
    shape = (5, 40)
    prox, behav, noise, advantages = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    logp = prox + noise
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = (torch.rand(shape, generator=generator) > 0.3).double()
    correction = Correction(weights * mask, mask, {})
    loss, gradient, metrics = evaluate(
        "vanilla",
        logp,
        prox,
        behav,
        advantages,
        mask=mask,
        correction=correction,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=1.5,
    )
    chosen = mask.bool()
    tokens = [
        plain_vanilla(*token, low=0.2, high=0.28, c=1.5)
        for token in zip(*(x[chosen].tolist() for x in (logp, prox, weights, advantages)), strict=True)
    ]
    count = len(tokens)
    losses, gradients, clipped, at_bound = (list(column) for column in zip(*tokens, strict=True))
    assert any(clipped) and any(at_bound)
    assert loss.item() == pytest.approx(sum(losses) / count)
    assert (gradient[chosen] * count).tolist() == pytest.approx(gradients)
    assert not gradient[~chosen].any()
    assert metrics == pytest.approx(
        {
            "actor/ratio_mean": noise[chosen].exp().mean().item(),
            "actor/clip_fraction": sum(clipped) / count,
            "actor/clip_fraction_c": sum(at_bound) / count,
            "actor/ppo_kl": -noise[chosen].mean().item(),
            "actor/behav_weight_mean": weights[chosen].mean().item(),
        }
    )


@pytest.mark.parametrize(("loss_mode", "loss_type"), KINDS)
@pytest.mark.parametrize("junk", [-200.0, -torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_infinities_leave_loss_and_gradient_alone(loss_mode, loss_type, junk, dtype):
    logp, old = torch.tensor([[-1.0, 0.0]], dtype=dtype), torch.tensor([[-1.0, junk]], dtype=dtype)
    mask = torch.tensor([[1, 0]])
    alone = evaluate(loss_mode, logp[:, :1], old[:, :1], old[:, :1], torch.ones(1, 1), loss_type=loss_type)
    config = RolloutCorrectionConfig.model_validate({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 1})
    for current in (logp, old):
        for correction in (
            None,
            rollout_correction(prox_logp=current, behav_logp=old, mask=mask, config=config),
        ):
            loss, gradient, metrics = evaluate(
                loss_mode,
                current,
                old,
                old,
                torch.tensor([[1.0, junk]]),
                mask=mask,
                correction=correction,
                loss_type=loss_type,
            )
            assert torch.equal(loss, alone[0])
            assert torch.equal(gradient, torch.cat([alone[1], torch.zeros(1, 1)], dim=1))
            assert metrics == alone[2]


@pytest.mark.parametrize(("loss_mode", "loss_type"), KINDS)
@pytest.mark.parametrize("rejected", [True, False])
def test_all_masked_or_all_rejected_is_zero(loss_mode, loss_type, rejected):
    x = torch.full((1, 3), torch.nan)
    mask = torch.ones(1, 3) if rejected else torch.zeros(1, 3)
    correction = Correction(x, torch.zeros(1, 3), {}) if rejected else None
    loss, gradient, metrics = evaluate(loss_mode, x, x, x, x, mask=mask, correction=correction, loss_type=loss_type)
    assert loss.item() == 0 and not gradient.any() and metrics == {}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "episode-mean"])
def test_rejection_does_not_change_the_denominators(mode):
    """The gradient of a token that stays is the same whatever happens to the others."""
    logp, prox = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones_like(logp)
    kept = ones.clone()
    kept[0, 1:] = 0
    kept[1] = 0
    arguments = ("vanilla", logp, prox, prox, ones)
    full = evaluate(*arguments, correction=Correction(None, ones, {}), loss_agg_mode=mode)
    part = evaluate(*arguments, correction=Correction(None, kept, {}), loss_agg_mode=mode)
    torch.testing.assert_close(part[1], full[1] * kept)


def test_a_rejected_token_may_hold_anything():
    logp, prox = row(-1.0, torch.nan), row(-1.0, -1.0)
    correction = rollout_correction(
        prox_logp=logp,
        behav_logp=prox,
        mask=row(1, 1),
        config=RolloutCorrectionConfig.model_validate({"rollout_rs": "token_k2", "rollout_rs_threshold": 1}),
    )
    loss, gradient, _ = evaluate("vanilla", logp, prox, prox, row(1, 1), mask=row(1, 1), correction=correction)
    assert loss.item() == -0.5 and gradient.tolist() == [[-0.5, 0]]


def test_a_non_finite_trained_token_is_not_hidden():
    for logp, prox, behav in ((torch.nan, -1, -1), (-1, torch.nan, -1), (-1, -1, torch.nan)):
        assert evaluate("vanilla", row(logp), row(prox), row(behav), row(1))[0].isnan()


def test_micro_batches_are_not_a_mean_of_means():
    """One token of loss 1 and nine of loss 0, as two micro-batches: 0.1."""
    totals = Totals(tokens=10, sequences=2, episodes=2)
    first = evaluate("vanilla", row(-1), row(-1), row(-1), row(-1), totals=totals)[0]
    nine = torch.zeros(1, 9, dtype=torch.float64)
    second = evaluate("vanilla", nine, nine, nine, nine, totals=totals)[0]
    assert (first + second).item() == pytest.approx(0.1)


@pytest.mark.parametrize("mask", [[0, 1, 1], [0, 1, 1, 0, 0, 1], [0, 1]])
def test_as_many_gradients_as_trained_tokens_none_shifted(mask):
    trained = torch.tensor([mask], dtype=torch.float64)
    advantages = torch.arange(1.0, len(mask) + 1, dtype=torch.float64)[None]
    same = -torch.ones_like(trained)
    _, gradient, _ = evaluate("vanilla", same, same, same, advantages, mask=trained, loss_agg_mode="token-sum")
    assert torch.equal(gradient, -advantages * trained)


def test_only_logp_has_a_gradient():
    logp, prox, behav, advantages = (row(-1.0).requires_grad_() for _ in range(4))
    for loss_mode, loss_type in KINDS:
        loss, metrics = policy_loss(
            loss_mode,
            logp=logp,
            prox_logp=prox,
            behav_logp=behav,
            advantages=advantages,
            mask=row(1),
            config=LossConfig(**{"loss_type": loss_type, **needed(loss_mode)}),
        )
        loss.backward()
        assert not any(tensor.requires_grad for pair in metrics.values() for tensor in pair)
    assert logp.grad is not None and prox.grad is None and behav.grad is None and advantages.grad is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_agg_mode": "mean"}, "loss_agg_mode 'mean'"),
        ({"clip_ratio_low": 1.2}, "clip_ratio_low"),
        ({"clip_ratio_high": -0.1}, "clip_ratio_high"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ({"loss_scale_factor": 10.0}, "no effect"),
        ({"loss_scale_factor": 0.0, "loss_agg_mode": "seq-mean-token-sum-norm"}, "positive"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"tau_neg": 0.0}, "tau_neg"),
        ({"clip_cov_ratio": -1.0}, "clip_cov_ratio"),
        ({"clip_cov_lb": 6.0}, "clip_cov_lb"),
        ({"dro_beta": 0.0}, "dro_beta"),
    ],
)
def test_a_wrong_constant_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


def test_errors_name_what_is_wrong():
    x = row(-1.0)
    with pytest.raises(UnknownNameError, match=r"loss_mode 'ppo'.*bypass_mode.*vanilla"):
        evaluate("ppo", x, x, x, x)
    with pytest.raises(ValueError, match=r"advantages has shape \[1, 2\]"):
        evaluate("vanilla", x, x, x, row(1, 1))
