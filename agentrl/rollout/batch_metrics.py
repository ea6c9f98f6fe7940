"""Numbers of the rollout side for one training step, as they stand in `metrics.jsonl`."""

from __future__ import annotations

import statistics

from agentrl.record import Batch, Trajectory
from agentrl.rollout.episode import Outcome


class RewardWindow:
    """The rewards of a training step: of the batch, and of the groups that were judged but filtered since the last one.

    So the mean is that of the policy, not of what the filter left, and every judged episode counts in exactly one step.
    """

    def __init__(self) -> None:
        self._filtered: list[Trajectory] = []
        self._failed = 0

    def filtered(self, outcomes: list[Outcome]) -> None:
        """These ended and will not be in any batch."""
        judged = [o.trajectory for o in outcomes if o.reward is not None and o.trajectory is not None]
        self._filtered += judged
        self._failed += len(outcomes) - len(judged)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Rewards and the shape of episodes; empties the window."""
        judged = [*batch.trajectories, *self._filtered]
        failed, self._filtered, self._failed = self._failed, [], 0
        rewards = [trajectory.reward for trajectory in judged]
        result = {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "episode/count": float(len(judged)),
            "episode/failed": float(failed),
            "episode/turns": statistics.fmean(t.turns for t in judged),
            "episode/branches": statistics.fmean(len(t.branches) for t in judged),
            "episode/tokens": statistics.fmean(t.sampled_tokens for t in judged),
            "episode/seconds": statistics.fmean(t.timings["episode"] for t in judged),
            "episode/truncated": statistics.fmean(t.status == "truncated" for t in judged),
        }
        for name in sorted({name for t in judged for name in t.reward_parts}):
            values = [t.reward_parts[name] for t in judged if name in t.reward_parts]
            result[f"reward/parts/{name}"] = statistics.fmean(values)
        return result


def staleness_metrics(batch: Batch) -> dict[str, float]:
    """How old a batch is, in policy versions: by each trajectory's oldest token, and weighted by tokens."""
    oldest = [batch.version - t.oldest_version for t in batch.trajectories if t.oldest_version is not None]
    tokens, lags = 0, 0
    for trajectory in batch.trajectories:
        for branch in trajectory.branches:
            trained = branch.trained_versions
            tokens += trained.size
            lags += batch.version * trained.size - int(trained.sum())
    result = {
        "staleness/lag_max": float(max(oldest)),
        "staleness/lag_mean": statistics.fmean(oldest),
        "staleness/lag_token_mean": lags / tokens,
        "staleness/partial_ratio": statistics.fmean(_mixed(t) for t in batch.trajectories),
        "tokens/trained": float(tokens),
        "reward/trained_mean": statistics.fmean(t.reward for t in batch.trajectories),
    }
    for lag in range(int(result["staleness/lag_max"]) + 1):
        result[f"staleness/lag_{lag}"] = statistics.fmean(value == lag for value in oldest)
    return result


def _mixed(trajectory: Trajectory) -> bool:
    """Whether a trajectory holds tokens of more than one policy version."""
    trained = [branch.trained_versions for branch in trajectory.branches]
    trained = [versions for versions in trained if versions.size]
    return min(int(versions.min()) for versions in trained) != max(int(versions.max()) for versions in trained)
