"""The numbers: pure functions from tensors to tensors. Shapes [B, T]; mask 1 on trained tokens."""

from agentrl.algorithm.advantage import AdvantageConfig, compute_advantages
from agentrl.algorithm.aggregate import Totals, aggregate, branch_weights
from agentrl.algorithm.correction import Correction, RolloutCorrectionConfig, engine_mismatch, rollout_correction
from agentrl.algorithm.group import GroupScores, group_scores
from agentrl.algorithm.kl import kl_penalty
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.loss import LossConfig, policy_loss
from agentrl.algorithm.metrics import MAXIMA, Metrics, mean_pair, merge, summarise
from agentrl.algorithm.normalise import NormConfig, normalise
from agentrl.algorithm.proximal import proximal_logp
from agentrl.algorithm.registry import Registry, UnknownNameError
from agentrl.algorithm.rewards import overlong_penalty, scaled
from agentrl.algorithm.value import value_loss

__all__ = [
    "MAXIMA",
    "AdvantageConfig",
    "Correction",
    "GroupScores",
    "Layout",
    "LossConfig",
    "Metrics",
    "NormConfig",
    "Registry",
    "RolloutCorrectionConfig",
    "Totals",
    "UnknownNameError",
    "aggregate",
    "branch_weights",
    "compute_advantages",
    "engine_mismatch",
    "group_scores",
    "kl_penalty",
    "mean_pair",
    "merge",
    "normalise",
    "overlong_penalty",
    "policy_loss",
    "proximal_logp",
    "rollout_correction",
    "scaled",
    "summarise",
    "value_loss",
]
