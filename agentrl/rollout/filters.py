"""Which finished groups are worth training."""

from __future__ import annotations

from agentrl.record import Fate
from agentrl.rollout.episode import Outcome


def group_fate(outcomes: list[Outcome], *, needs_baseline: bool, filter_zero_variance: bool) -> tuple[Fate, str] | None:
    """Why a group is not trained, or None if it is.

    Args:
        outcomes: of all members; the failed ones have fates of their own and are not in any statistic.
        needs_baseline: the estimator compares members, so that one alone says nothing.
        filter_zero_variance: drop groups whose usable members all earned the same.
    """
    usable = [outcome for outcome in outcomes if outcome.usable]
    if not usable or (needs_baseline and len(usable) < 2):
        return Fate.GROUP_INCOMPLETE, f"{len(usable)} of {len(outcomes)} members usable"
    rewards = {outcome.reward.value for outcome in usable if outcome.reward is not None}
    turn_rewards = any(
        turn.reward is not None
        for outcome in usable
        if outcome.trajectory is not None
        for branch in outcome.trajectory.branches
        for turn in branch.turns
    )
    if filter_zero_variance and len(rewards) == 1 and not turn_rewards:
        return Fate.FILTERED, f"all rewards are {rewards.pop():g}"
    return None
