"""The keys of the update: from rewards to advantages, the policy's loss, the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.correction import RolloutCorrectionConfig
from agentrl.config.normalisation import NormConfig
from agentrl.config.section import Section

Share = Annotated[float, Field(ge=0, lt=1)]


class KLControlConfig(Section):
    """How strong the KL penalty in the reward is."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows `target_kl`."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, at the beginning."""
    target_kl: float = Field(default=0.1, gt=0)
    """Adaptive: nats a token that are aimed at."""
    horizon: int = Field(default=10_000, ge=1)
    """Adaptive: episodes over which the coefficient follows."""


class AlgorithmConfig(Section):
    """From rewards to advantages, and the correction for being off-policy."""

    adv_estimator: str = "grpo"
    """Advantage estimator, by verl's name, or one of yours: `package.module:function`, or an entry point of the group
    `agentrl.advantages`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group-relative advantages by the group's standard deviation (`grpo`, `grpo_passk`, `gdpo`); false is
    Dr.GRPO."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a step (`gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae`: 0 trusts the critic, 1 the rewards."""
    gae_timestep: Literal["token", "turn"] = "token"
    """What a step of `gae` is: a trained token, or a turn of the model, whose tokens then share an advantage."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """`gdpo`: the parts of the reward (`Reward.parts`) that are normalised one by one; needed there. An episode without
    such a part has earned 0 of it."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """`gdpo`: their weights. Default: 1 each."""
    branch_weighting: Literal["episode", "branch", "token"] = "episode"
    """How much the branches of an episode count in the loss, if it has several: `episode` 1 together, in equal shares;
    `branch` 1 each; `token` 1 together, in shares of their trained tokens."""
    reward_bias: float = 0.0
    """Added to the reward of every episode (not to those of turns), before it is scaled."""
    reward_scaling: float = Field(default=1.0, gt=0)
    """Rewards of episodes and turns are multiplied with this."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Rewards of episodes (not of turns) are cut to +- this, after scaling."""
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """DAPO's penalty for long answers: over the last so many tokens before `data.max_response_length` an episode loses
    reward, by its longest turn. Default: no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """What an answer of `data.max_response_length` tokens loses."""
    reward_norm: NormConfig | None = None
    """Normalise the episodes' rewards (not those of turns) before the advantage estimator. Default: no."""
    adv_norm: NormConfig | None = None
    """Normalise the advantages of all trained tokens after it. Default: no."""
    use_kl_in_reward: bool = False
    """Take a penalty for the divergence from the reference policy (the untrained one) off every token's reward.
    Estimators that compare whole episodes (`grpo`, `rloo`, ...) sum it over each branch, and average those sums."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """How that divergence is estimated."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """How strong it is."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Weights between the behaviour policy (which sampled) and the proximal policy (the anchor of the clip)."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, down to `min_lr_ratio` at the last step of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of `lr`."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's exponential decay rates."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""


class ActorConfig(Section):
    """The policy update."""

    proximal: Literal["recompute", "loglinear", "bypass"] = "recompute"
    """Proximal policy of decoupled PPO. `recompute`: one extra forward with the weights that `prox_anchor` names;
    `loglinear`: interpolated between the behaviour and the current policy by their versions, no extra forward;
    `bypass`: the behaviour policy itself, no extra forward."""
    prox_anchor: Literal["step", "publish"] = "step"
    """Which weights the proximal policy has: those at the start of the training step, or those of the last
    publication, which are others where `async_training.trigger_parameter_sync_step` is above 1."""
    loss_mode: str = "vanilla"
    """Policy loss, by verl's name, or one of yours: `package.module:function`, or an entry point of the group
    `agentrl.losses`."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number, by verl's name. Denominators are those of the whole optimiser step."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Tokens that `seq-mean-token-sum-norm` divides by. Default: `data.max_response_length`."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + this (higher than `clip_ratio_low`: clip-higher)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the loss for negative advantages, as a multiple of the advantage."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: steepness for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: steepness for the other advantages."""
    clip_cov_ratio: float = Field(default=0.0002, gt=0)
    """`clip_cov`: share of the tokens whose gradient is left out."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: lowest covariance of a token that may be left out."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: highest covariance of such a token."""
    kl_cov_ratio: float = Field(default=0.0002, gt=0)
    """`kl_cov`: share of the tokens that are penalised, those of highest covariance."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """`kl_cov`: weight of the penalty."""
    dro_beta: float | None = Field(default=None, gt=0)
    """`dro`: weight of the quadratic term; needed there."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add the divergence from the reference policy (the untrained one) to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """How it is estimated: kl (k1), abs, mse (k2), low_var_kl (k3); with a trailing `+` the gradient is that of k2,
    which is unbiased."""
    ppo_mini_batch_size: int = Field(default=16, ge=1)
    """Groups of each optimiser step."""
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=1)
    """Most tokens packed into one micro-batch; longer sequences get one of their own."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; above it the gradient is scaled down. Non-finite: the step is skipped."""
    optim: OptimConfig = OptimConfig()
    """Optimiser."""


class CriticConfig(Section):
    """The value model of `gae`, trained beside the policy."""

    path: str | None = None
    """The model it starts from, given like `model.path`; its value head is new. Default: the policy's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimiser."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Like `actor.grad_clip`."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """How far a value may move in a training step before its loss stops counting, in the unit of rewards."""
    loss_agg_mode: str = "token-mean"
    """Like `actor.loss_agg_mode`."""
