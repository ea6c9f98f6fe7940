"""The names of the algorithms a configuration can ask for, so that a typo is found without importing torch.

They are verl's. `agentrl/algorithm` registers a function under each of them; a test compares the two.
"""

from __future__ import annotations

ADV_ESTIMATORS = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")
"""Values of `algorithm.adv_estimator`."""

GROUP_BASELINES = frozenset({"grpo", "reinforce_plus_plus_baseline", "rloo"})
"""Estimators that compare an episode with the others of its group: a group of one teaches them nothing."""

LOSS_MODES = ("bypass_mode", "vanilla")
"""Values of `actor.loss_mode`."""

LOSS_AGG_MODES = (
    "episode-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "token-sum",
)
"""Values of `actor.loss_agg_mode`."""
