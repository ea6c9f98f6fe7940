"""Numbers of the rollout side for one training step, as they stand in `metrics.jsonl`."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np

from agentrl.record import Batch, Group, Trajectory
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
        environments = sorted({t.environment for t in judged})
        for name in environments if len(environments) > 1 or environments != ["default"] else []:
            own = [t for t in judged if t.environment == name]
            result[f"environment/{name}/reward"] = statistics.fmean(t.reward for t in own)
            result[f"environment/{name}/share"] = len(own) / len(judged)
        for name in sorted({name for t in judged for name in t.reward_parts}):
            values = [t.reward_parts[name] for t in judged if name in t.reward_parts]
            result[f"reward/parts/{name}"] = statistics.fmean(values)
        return result


def staleness_metrics(batch: Batch) -> dict[str, float]:
    """How old a batch is, in policy versions: by each trajectory's oldest token, and weighted by tokens."""
    oldest: list[int] = []
    tokens, lags, masked = 0, 0, 0
    for trajectory in batch.trajectories:
        versions = np.concatenate([branch.trained_versions for branch in trajectory.branches])
        trained = versions if batch.min_version is None else versions[versions >= batch.min_version]
        masked += versions.size - trained.size
        tokens += trained.size
        lags += batch.version * trained.size - int(trained.sum())
        if trained.size:
            oldest.append(batch.version - int(trained.min()))
    result = {
        "staleness/lag_max": float(max(oldest)),
        "staleness/lag_mean": statistics.fmean(oldest),
        "staleness/lag_token_mean": lags / tokens,
        "staleness/partial_ratio": statistics.fmean(_mixed(t) for t in batch.trajectories),
        "tokens/trained": float(tokens),
        "reward/trained_mean": statistics.fmean(t.reward for t in batch.trajectories),
    }
    if batch.min_version is not None:
        result["staleness/masked_fraction"] = masked / (masked + tokens)
    for lag in range(int(result["staleness/lag_max"]) + 1):
        result[f"staleness/lag_{lag}"] = statistics.fmean(value == lag for value in oldest)
    return result


def comes_too_late(trajectory: Trajectory, batch: Batch) -> bool:
    """Whether no token of a batch's trajectory is young enough to be trained: it only counts in its group."""
    newest = trajectory.newest_version
    return batch.min_version is not None and newest is not None and newest < batch.min_version


class StaleShares:
    """Which share of the finished trajectories came too late, by their length: dropping filters against long answers.

    Counted since the start of the run, in bins of sampled tokens that double in width.
    """

    def __init__(self) -> None:
        self._all: Counter[int] = Counter()
        self._stale: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        """These were trained, as far as they did not come too late."""
        for trajectory in batch.trajectories:
            self._add(trajectory, stale=comes_too_late(trajectory, batch))

    def add_stale(self, group: Group) -> None:
        """These came too late."""
        for trajectory in group.trajectories:
            self._add(trajectory, stale=True)

    def _add(self, trajectory: Trajectory, *, stale: bool) -> None:
        size = trajectory.sampled_tokens.bit_length()
        self._all[size] += 1
        self._stale[size] += stale

    def metrics(self) -> dict[str, float]:
        """The share of every bin seen so far, once any came too late; `tokens_64` holds 64 to 127."""
        if not self._stale.total():
            return {}
        return {f"staleness/stale_share/tokens_{2**size // 2}": self._stale[size] / n for size, n in self._all.items()}


def _mixed(trajectory: Trajectory) -> bool:
    """Whether a trajectory holds tokens of more than one policy version."""
    trained = [branch.trained_versions for branch in trajectory.branches]
    trained = [versions for versions in trained if versions.size]
    return min(int(versions.min()) for versions in trained) != max(int(versions.max()) for versions in trained)
