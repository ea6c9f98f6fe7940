"""What policy losses get, and the registry they are found in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from agentrl.algorithm.aggregate import AGGREGATIONS
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.metrics import Metrics
from agentrl.algorithm.registry import Registry


@dataclass(frozen=True)
class LossConfig:
    """The constants of the policy losses.

    Attributes:
        clip_ratio_low: the ratio r is clipped below at 1 - this.
        clip_ratio_high: the ratio r is clipped above at 1 + this.
        clip_ratio_c: dual clip: with A < 0 a token's loss is at most -A times this; above 1.
        loss_agg_mode: a mode of `aggregate`.
        loss_scale_factor: tokens by which `seq-mean-token-sum-norm` divides; None uses the row width.
        loss_type: the loss under `bypass_mode`.
        tau_pos, tau_neg: `sapo`: steepness of its sigmoid for positive and for other advantages.
        clip_cov_ratio: `clip_cov`: share of the tokens that is left out, of those whose covariance lies between
            `clip_cov_lb` and `clip_cov_ub`.
        kl_cov_ratio: `kl_cov`: share of the tokens that is penalised, those of highest covariance.
        ppo_kl_coef: `kl_cov`: weight of the penalty.
        dro_beta: `dro`: weight of the quadratic term, without which there is no `dro`.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None

    def __post_init__(self) -> None:
        AGGREGATIONS.get(self.loss_agg_mode)
        if not 0 <= self.clip_ratio_low <= 1:
            raise ValueError(f"clip_ratio_low is {self.clip_ratio_low}: 1 - clip_ratio_low must lie in [0, 1]")
        if not self.clip_ratio_high >= 0:
            raise ValueError(f"clip_ratio_high is {self.clip_ratio_high}: pass 0 or more")
        if not self.clip_ratio_c > 1:
            raise ValueError(f"clip_ratio_c is {self.clip_ratio_c}: pass a value above 1, e.g. 3.0")
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise ValueError(f"loss_scale_factor is {self.loss_scale_factor}: pass a positive number of tokens")
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_factor has no effect with loss_agg_mode {self.loss_agg_mode}: "
                "leave it out or use seq-mean-token-sum-norm"
            )
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"loss_type is {self.loss_type!r}: use ppo_clip or reinforce")
        for name in ("tau_pos", "tau_neg", "clip_cov_ratio", "kl_cov_ratio", "dro_beta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: pass a positive number")
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb is {self.clip_cov_lb}: it lies below clip_cov_ub, {self.clip_cov_ub}")


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss function works on, all [B, T] and 0 outside `kept`; only `logp` carries a gradient.

    Attributes:
        kept: bool, the trained tokens that rejection left.
        weights: by which `policy_loss` multiplies what a loss returns for each token; None for no weight.
    """

    logp: Tensor
    prox_logp: Tensor
    behav_logp: Tensor
    advantages: Tensor
    kept: Tensor
    layout: Layout
    config: LossConfig
    weights: Tensor | None


LOSSES: Registry[Callable[[LossInputs], tuple[Tensor, Metrics]]] = Registry("loss_mode", entry_points="agentrl.losses")
"""Functions from `LossInputs` to per-token losses [B, T], without the weights, and metrics over the kept tokens."""
