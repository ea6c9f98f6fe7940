"""The numbers: pure functions from tensors to tensors. Shapes [B, T]; mask 1 on trained tokens."""

from agentrl.algorithm.advantage import AdvantageConfig, compute_advantages
from agentrl.algorithm.aggregate import Totals, aggregate
from agentrl.algorithm.correction import Correction, RolloutCorrectionConfig, rollout_correction
from agentrl.algorithm.group import GroupScores, group_scores
from agentrl.algorithm.kl import kl_penalty
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.loss import LossConfig, policy_loss
from agentrl.algorithm.metrics import MAXIMA, Metrics, mean_pair, merge, summarise
from agentrl.algorithm.proximal import proximal_logp
from agentrl.algorithm.registry import Registry, UnknownNameError

__all__ = [
    "MAXIMA",
    "AdvantageConfig",
    "Correction",
    "GroupScores",
    "Layout",
    "LossConfig",
    "Metrics",
    "Registry",
    "RolloutCorrectionConfig",
    "Totals",
    "UnknownNameError",
    "aggregate",
    "compute_advantages",
    "group_scores",
    "kl_penalty",
    "mean_pair",
    "merge",
    "policy_loss",
    "proximal_logp",
    "rollout_correction",
    "summarise",
]
