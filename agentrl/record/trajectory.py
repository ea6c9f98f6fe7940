"""The training record: arrays, one entry a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

IDS = np.int32
LOGPROBS = np.float32
MASK = np.uint8

Status = Literal["completed", "truncated", "aborted"]


@dataclass(slots=True)
class Turn:
    """One sampled turn inside a branch.

    Attributes:
        start, end: its tokens are `[start:end]` of the branch.
        temperature: what it was sampled at; the trainer divides logits by it.
        finish_reason: `stop` (a stop token ended it) or `length` (the token limit did).
        reward: turn-level credit given by the agent, or None.
    """

    start: int
    end: int
    temperature: float
    finish_reason: str
    reward: float | None = None


@dataclass(slots=True)
class Branch:
    """A conversation from its first token to a leaf of the message graph.

    Attributes:
        token_ids: int32 `[T]`.
        loss_mask: uint8 `[T]`, 1 on tokens this branch trains.
        logprobs: float32 `[T]`, rollout log-probs; 0 where not trained.
        versions: int32 `[T]`, policy version of each token; -1 where not trained.
        turns: the turns sampled in this branch; `loss_mask` says of which the tokens are trained.
        extras: further arrays whose first axis is the token axis (expert routing, ...).
        blobs: references to what does not fit a token axis (images, ...).
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: list[Turn]
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    blobs: list[str] = field(default_factory=list)

    @classmethod
    def context(cls, token_ids: np.ndarray, turns: list[Turn]) -> Branch:
        """A branch of which nothing is trained yet."""
        size = len(token_ids)
        return cls(
            np.asarray(token_ids, IDS),
            np.zeros(size, MASK),
            np.zeros(size, LOGPROBS),
            np.full(size, -1, IDS),
            turns,
        )

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; None if there are none."""
        trained = self.trained_versions
        return int(trained.min()) if trained.size else None

    @property
    def trained_versions(self) -> np.ndarray:
        """int32 `[N]`: the policy version of each trained token."""
        return self.versions[self.loss_mask == 1]

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def temperatures(self) -> np.ndarray:
        """float32 `[T]`: sampling temperature of each token; 1 where not sampled."""
        result = np.ones(len(self.token_ids), np.float32)
        for turn in self.turns:
            result[turn.start : turn.end] = turn.temperature
        return result


@dataclass(slots=True)
class Trajectory:
    """An episode as training data: who it was, what it earned, and its branches.

    Attributes:
        environment: name of the environment its task belongs to.
        reward: of the episode, never weighted by turns or branches.
        reward_parts: named parts of it, for the report.
        status: `completed`, `truncated` (a limit cut it, the agent scored it all the same) or `aborted`.
        timings: seconds, by what they were spent on.
        metrics: numbers of the agent or environment.
    """

    episode_id: str
    group_id: str
    task_id: str
    dataset_index: int
    epoch: int
    branches: list[Branch]
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    status: Status = "completed"
    version_admitted: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    environment: str = "default"

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the episode's trained tokens; None if there are none."""
        versions = [b.oldest_version for b in self.branches if b.oldest_version is not None]
        return min(versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """The newest policy version among them; None if there are none."""
        versions = [int(b.trained_versions.max()) for b in self.branches if b.trained_tokens]
        return max(versions, default=None)

    @property
    def turns(self) -> int:
        return sum(len(branch.turns) for branch in self.branches)

    @property
    def sampled_tokens(self) -> int:
        return sum(branch.trained_tokens for branch in self.branches)


@dataclass(slots=True)
class Group:
    """The usable episodes of one task, as group-relative advantages need them together.

    Attributes:
        version_admitted: policy version when the group was admitted; no token of it is older.
        greedy: a greedy episode of the task, to compare with and not to train, where the estimator asks for one.
    """

    id: str
    trajectories: list[Trajectory]
    version_admitted: int
    greedy: Trajectory | None = None

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the trained tokens of all members."""
        versions = [t.oldest_version for t in self.trajectories if t.oldest_version is not None]
        return min(versions, default=self.version_admitted)

    @property
    def newest_version(self) -> int:
        """The newest policy version among them."""
        versions = [t.newest_version for t in self.trajectories if t.newest_version is not None]
        return max(versions, default=self.version_admitted)


@dataclass(slots=True)
class Batch:
    """What the trainer takes for one training step.

    Attributes:
        version: policy version of the weights that will train on it.
        metrics: of the rollout side since the last batch, as they stand in `metrics.jsonl`.
        min_version: tokens sampled under an older version are not trained, though their episodes stay in the statistics
            of their groups; None trains all.
    """

    id: int
    version: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    min_version: int | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]
