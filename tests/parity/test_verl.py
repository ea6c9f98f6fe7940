"""The same numbers as verl 0.9.1, in value and gradient, for every name that both have.

What differs on purpose is tested as it is meant to be, with the reason, in `test_deviations.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlCorrection
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from agentrl.algorithm import (
    AdvantageConfig,
    Correction,
    LossConfig,
    RolloutCorrectionConfig,
    Totals,
    aggregate,
    compute_advantages,
    kl_penalty,
    policy_loss,
    rollout_correction,
    value_loss,
)
from agentrl.config.correction import PRESETS
from agentrl.config.names import CHOOSE_TOKENS, LOSS_MODES
from tests.parity.batches import RandomBatch, random_batch

SEEDS = range(5)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
BOUNDS: dict[str, dict[str, Any]] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}  # type: ignore[dict-item]
CONSTANTS: dict[str, Any] = {
    **BOUNDS,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.1,
    "clip_cov_lb": 0.2,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.1,
    "ppo_kl_coef": 0.1,
    "dro_beta": 0.5,
}
POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
pytestmark = pytest.mark.parametrize("seed", SEEDS)


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=1e-9)


def verl_config(mode: str, correction: Any = None) -> ActorConfig:
    policy = {"loss_mode": mode, **{name: CONSTANTS[name] for name in POLICY_LOSS}}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        **BOUNDS,  # type: ignore[arg-type]
        tau_pos=CONSTANTS["tau_pos"],
        tau_neg=CONSTANTS["tau_neg"],
    )
    for name, value in policy.items():
        object.__setattr__(config.policy_loss, name, value)
    if correction is not None:
        object.__setattr__(config.policy_loss, "rollout_correction", correction)
    return config


def counts(batch: RandomBatch, scale: float | None = None) -> dict[str, Any]:
    """The denominators of the whole batch, as verl's trainer hands them to its losses."""
    given = {"batch_num_tokens": batch.mask.sum(), "global_batch_size": len(batch.mask)}
    return given if scale is None else {**given, "loss_scale_factor": scale}


def their_loss(
    mode: str, batch: RandomBatch, aggregation: str, weights: Tensor | None, mask: Tensor
) -> tuple[Any, ...]:
    logp = batch.logp.clone().requires_grad_()
    config = verl_config(mode)
    object.__setattr__(
        config, "global_batch_info", counts(batch, 7.0 if aggregation == "seq-mean-token-sum-norm" else None)
    )
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch.prox,
        log_prob=logp,
        advantages=batch.advantages,
        response_mask=mask,
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.detach(), logp.grad


def our_loss(mode: str, batch: RandomBatch, aggregation: str, correction: Correction) -> tuple[Any, ...]:
    logp = batch.logp.clone().requires_grad_()
    scale = 7.0 if aggregation == "seq-mean-token-sum-norm" else None
    loss, _ = policy_loss(
        mode,
        logp=logp,
        prox_logp=batch.prox,
        behav_logp=batch.behav,
        advantages=batch.advantages,
        mask=batch.mask,
        config=LossConfig(loss_agg_mode=aggregation, loss_scale_factor=scale, **CONSTANTS),
        layout=batch.layout,
        correction=correction,
        totals=Totals.count(batch.mask, batch.layout),
    )
    loss.backward()
    return loss.detach(), logp.grad


def combinations() -> list[tuple[str, str, bool]]:
    """Loss, aggregation and whether tokens are rejected: there the denominators of one differ on purpose."""
    modes = [mode for mode in LOSS_MODES if mode != "bypass_mode"]
    pairs = [
        (mode, aggregation)
        for mode in modes
        for aggregation in (AGGREGATIONS if mode not in ("gspo", "sapo", "geo_mean") else ("seq-mean-token-mean",))
    ]
    rejecting = [(*pair, True) for pair in pairs if pair[1] != "seq-mean-token-mean"]
    return [(*pair, False) for pair in pairs] + rejecting


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("mode", "aggregation", "rejecting"), combinations())
def test_losses(seed: int, mode: str, aggregation: str, rejecting: bool, weighted: bool) -> None:
    batch = random_batch(seed)
    if mode in CHOOSE_TOKENS:  # which clamp their ratios here, see test_deviations.py
        batch = replace(batch, logp=batch.prox + (batch.logp - batch.prox).clamp(-20, 20))
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch.mask.shape, dtype=torch.float64, generator=generator) * batch.mask if weighted else None
    kept = batch.mask * (torch.rand(batch.mask.shape, generator=generator) < 0.8) if rejecting else batch.mask
    torch.manual_seed(seed)
    theirs = their_loss(mode, batch, aggregation, weights, kept)
    torch.manual_seed(seed)
    ours = our_loss(mode, batch, aggregation, Correction(weights, kept, {}))
    same(ours[0], theirs[0])
    same(ours[1], theirs[1])


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("rejection", [None, ("seq_mean_k3", "0.3"), ("token_k2", "0.2"), ("seq_max_k3", "1.0")])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_bypass(seed: int, loss_type: str, rejection: tuple[str, str] | None, level: str | None) -> None:
    batch = random_batch(seed)
    names, bounds = rejection or (None, None)
    theirs = VerlCorrection(
        bypass_mode=True, loss_type=loss_type, rollout_is=level, rollout_rs=names, rollout_rs_threshold=bounds
    )
    config = verl_config("bypass_mode", theirs)
    object.__setattr__(config, "global_batch_info", counts(batch))
    logp = batch.logp.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn("bypass_mode")(
        old_log_prob=batch.behav,
        log_prob=logp,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    own = batch.logp.clone().requires_grad_()
    correction = rollout_correction(
        prox_logp=own.detach(),
        behav_logp=batch.behav,
        mask=batch.mask,
        config=RolloutCorrectionConfig.model_validate(
            {"rollout_is": level, "rollout_rs": names, "rollout_rs_threshold": bounds, "loss_type": loss_type}
        ),
        layout=batch.layout,
    )
    mine, _ = policy_loss(
        "bypass_mode",
        logp=own,
        prox_logp=batch.behav,
        behav_logp=batch.behav,
        advantages=batch.advantages,
        mask=batch.mask,
        config=LossConfig(loss_type=loss_type, **CONSTANTS),  # type: ignore[arg-type]
        layout=batch.layout,
        correction=correction,
    )
    mine.backward()
    same(mine.detach(), loss.detach())
    assert own.grad is not None and logp.grad is not None
    same(own.grad, logp.grad)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(seed: int, preset: str) -> None:
    batch = random_batch(seed)
    theirs = getattr(VerlCorrection, preset)()
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.prox,
        rollout_log_prob=batch.behav,
        response_mask=batch.mask,
        rollout_is=theirs.rollout_is,
        rollout_is_threshold=theirs.rollout_is_threshold,
        rollout_rs=theirs.rollout_rs,
        rollout_rs_threshold=theirs.rollout_rs_threshold,
        rollout_is_batch_normalize=theirs.rollout_is_batch_normalize,
    )
    config = RolloutCorrectionConfig.preset(preset)
    ours = rollout_correction(
        prox_logp=batch.prox, behav_logp=batch.behav, mask=batch.mask, config=config, layout=batch.layout
    )
    assert config.bypass_mode == theirs.bypass_mode and config.loss_type == (theirs.loss_type or "ppo_clip")
    same(ours.mask, mask)
    assert (ours.weights is None) == (proto is None)
    if ours.weights is not None:
        same(ours.weights, proto.batch["rollout_is_weights"] * batch.mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalised_weights(seed: int, level: str) -> None:
    batch = random_batch(seed)
    proto, _, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.prox,
        rollout_log_prob=batch.behav,
        response_mask=batch.mask,
        rollout_is=level,
        rollout_is_batch_normalize=True,
    )
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_batch_normalize": True})
    ours = rollout_correction(
        prox_logp=batch.prox, behav_logp=batch.behav, mask=batch.mask, config=config, layout=batch.layout
    )
    assert ours.weights is not None
    same(ours.weights, proto.batch["rollout_is_weights"] * batch.mask)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize(
    "estimator",
    [
        "grpo",
        "grpo_passk",
        "gpg",
        "opo",
        "rloo",
        "reinforce_plus_plus_baseline",
        "reinforce_plus_plus",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ],
)
def test_estimators(seed: int, estimator: str, by_std: bool) -> None:
    batch = random_batch(seed)
    takes = {"config": AlgoConfig(gamma=0.97, norm_adv_by_std_in_grpo=by_std), "index": batch.index}
    if estimator == "grpo":
        takes["norm_adv_by_std_in_grpo"] = by_std
    if "optimal" in estimator:
        takes |= {"old_log_probs": batch.prox.clamp(max=-0.01), "sum_pi_squared": batch.squares}
    theirs = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=batch.rewards.clone(), response_mask=batch.mask, **takes
    )
    ours = compute_advantages(
        estimator,
        token_rewards=batch.rewards,
        mask=batch.mask,
        layout=batch.layout,
        config=AdvantageConfig(gamma=0.97, norm_adv_by_std_in_grpo=by_std),
        logp=batch.prox.clamp(max=-0.01),
        sum_pi_squared=batch.squares,
    )
    same(ours[0], theirs[0] * batch.mask)
    same(ours[1], theirs[1] * batch.mask)


def test_optimal_baselines_with_importance_weights(seed: int) -> None:
    batch = random_batch(seed)
    weights = torch.rand(batch.mask.shape, dtype=torch.float64)
    for estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        theirs, _ = core_algos.get_adv_estimator_fn(estimator)(
            token_level_rewards=batch.rewards,
            response_mask=batch.mask,
            index=batch.index,
            old_log_probs=batch.behav,
            sum_pi_squared=batch.squares,
            rollout_is_weights=weights,
        )
        ours, _ = compute_advantages(
            estimator,
            token_rewards=batch.rewards,
            mask=batch.mask,
            layout=batch.layout,
            config=AdvantageConfig(),
            logp=batch.behav,
            sum_pi_squared=batch.squares,
            importance_weights=weights,
        )
        same(ours, theirs * batch.mask)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    batch = random_batch(seed)
    advantages, returns = core_algos.compute_gae_advantage_return(
        batch.rewards,
        batch.values,
        batch.mask,
        gamma,
        lam,  # type: ignore[arg-type]
    )
    ours = compute_advantages(
        "gae",
        token_rewards=batch.rewards,
        mask=batch.mask,
        layout=batch.layout,
        config=AdvantageConfig(gamma=gamma, lam=lam),
        values=batch.values,
    )
    same(ours[0], advantages * batch.mask)
    same(ours[1], returns * batch.mask)


def test_remax(seed: int) -> None:
    batch = random_batch(seed)
    baselines = torch.from_numpy(np.random.default_rng(seed).normal(size=len(batch.mask)))
    advantages, returns = core_algos.compute_remax_outcome_advantage(batch.rewards, baselines, batch.mask)
    ours = compute_advantages(
        "remax",
        token_rewards=batch.rewards,
        mask=batch.mask,
        layout=batch.layout,
        config=AdvantageConfig(),
        baselines=baselines,
    )
    same(ours[0], advantages * batch.mask)
    same(ours[1], returns * batch.mask)


@pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
def test_gdpo(seed: int, weights: list[float] | None) -> None:
    """Their parts of the reward are float32, which is why they are multiples of 1/64 here."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    parts = {name: rng.integers(-64, 64, len(batch.mask)) / 64 for name in ("answer", "format")}
    ends = torch.ones_like(batch.mask, dtype=torch.long)
    lengths = batch.mask.shape[1] - 1 - batch.mask.flip(1).argmax(1)
    ends[torch.arange(batch.mask.shape[1]) > lengths[:, None]] = 0
    prompts = torch.ones(len(batch.mask), 3, dtype=torch.long)
    config = AlgoConfig(gdpo_reward_keys=list(parts), gdpo_reward_weights=weights)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        batch.rewards,
        batch.mask,
        batch.index,
        config=config,
        non_tensor_batch=parts,
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, ends], dim=1)},
    )
    placed = {
        name: torch.zeros_like(batch.mask).scatter(1, lengths[:, None], torch.from_numpy(values)[:, None])
        for name, values in parts.items()
    }
    ours, _ = compute_advantages(
        "gdpo",
        token_rewards=batch.rewards,
        mask=batch.mask,
        layout=batch.layout,
        config=AdvantageConfig(gdpo_reward_keys=tuple(parts), gdpo_reward_weights=tuple(weights or ())),
        reward_parts=placed,
    )
    torch.testing.assert_close(ours, (theirs * batch.mask).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(seed: int, aggregation: str) -> None:
    batch = random_batch(seed)
    values = batch.values.clone().requires_grad_()
    theirs = core_algos.agg_loss(values, batch.mask, aggregation)
    theirs.backward()
    own = batch.values.clone().requires_grad_()
    ours = aggregate(own, batch.mask, aggregation, layout=batch.layout)
    ours.backward()
    assert own.grad is not None and values.grad is not None
    same(ours.detach(), theirs.detach())
    same(own.grad, values.grad)


@pytest.mark.parametrize("straight_through", ["", "+"])
@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_estimates(seed: int, name: str, straight_through: str) -> None:
    batch = random_batch(seed)
    theirs, ours = (batch.logp.clone().requires_grad_() for _ in range(2))
    expected = core_algos.kl_penalty(theirs, batch.behav, name + straight_through)
    got = kl_penalty(ours, batch.behav, name + straight_through)
    same(got.detach(), expected.detach())
    (expected * batch.mask).sum().backward()
    (got * batch.mask).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    same(ours.grad, theirs.grad)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_value_loss(seed: int, aggregation: str) -> None:
    batch = random_batch(seed)
    theirs, ours = (batch.values.clone().requires_grad_() for _ in range(2))
    expected, fraction = core_algos.compute_value_loss(
        theirs, batch.rewards, batch.values + batch.logp, batch.mask, 0.5, aggregation
    )
    got, metrics = value_loss(
        values=ours,
        old_values=batch.values + batch.logp,
        returns=batch.rewards,
        mask=batch.mask,
        cliprange_value=0.5,
        loss_agg_mode=aggregation,
    )
    expected.backward()
    got.backward()
    same(got.detach(), expected.detach())
    assert ours.grad is not None and theirs.grad is not None
    same(ours.grad, theirs.grad)
    total, count = metrics["critic/clip_fraction"]
    same((total / count).double(), fraction.double())


def test_the_adaptive_kl_coefficient(seed: int) -> None:
    from agentrl.trainer.kl_control import KLController

    theirs = core_algos.AdaptiveKLController(0.2, 0.1, 1000)
    ours = KLController(0.2, target_kl=0.1, horizon=1000)
    for kl in np.random.default_rng(seed).uniform(0, 1, 10):
        theirs.update(kl, 64)
        ours.update(float(kl), 64)
    assert ours.value == pytest.approx(theirs.value)
