"""What an agent is asked to do, and what became of the attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agentrl.record.messages import Message

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data.

    Attributes:
        prompt: the question, or the first chat messages.
        answer: what the environment or the agent compares with; any JSON value.
        id: stable name of the task; by default `<split>-<index>`.
        data: every further column of the row.
        environment: name of the environment it belongs to, among several that are trained together.
        index: position in the data set, from 0; several environments' tasks are counted through.
        epoch: pass over the data set, from 0.
        split: `train`, or `val` when the episode only measures.
    """

    prompt: str | list[Message]
    answer: Any = None
    id: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    environment: str = "default"
    index: int = 0
    epoch: int = 0
    split: Split = "train"

    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


class Fate(StrEnum):
    """How an episode ended; every dispatched episode gets exactly one."""

    TRAINED = "trained"
    """Its tokens were in an optimiser step."""
    STALE = "stale"
    """Older than the staleness bound when a batch was taken, and not to be played again."""
    FILTERED = "filtered"
    """Its group had no variance in rewards."""
    GROUP_INCOMPLETE = "group_incomplete"
    """Fewer than two usable members under an estimator with a group baseline."""
    ENV_ERROR = "env_error"
    """The environment's machinery failed; nobody judged the answer."""
    ENGINE_ERROR = "engine_error"
    """No engine could answer."""
    AGENT_ERROR = "agent_error"
    """The agent's own code raised, or recorded no model call."""
    TIMEOUT = "timeout"
    """It ran longer than `rollout.episode_timeout`."""
    TRUNCATED = "truncated"
    """A token limit cut it, and `rollout.on_truncation` or the lack of any sampled token keeps it out of training."""
    CANCELLED = "cancelled"
    """The run ended first."""
    SUPERSEDED = "superseded"
    """Another attempt of the same episode replaced it."""


@dataclass(frozen=True, slots=True)
class FateRecord:
    """One line of `fates.jsonl`.

    Attributes:
        version_admitted: policy version when the episode was admitted.
        version_oldest: oldest version among its trained tokens; None without any.
        version_ended: policy version when the fate was sealed.
        reward: None when nobody judged it.
        tokens: sampled tokens.
        attempts: how often it was played; all other numbers are of the last time.
        seconds: wall time from the start to the end of the agent's run.
        time: Unix time of the fate.
    """

    episode_id: str
    group_id: str
    task_id: str
    dataset_index: int
    epoch: int
    fate: Fate
    reason: str
    version_admitted: int
    version_oldest: int | None
    version_ended: int
    reward: float | None
    turns: int
    tokens: int
    seconds: float
    time: float
    environment: str = "default"
    attempts: int = 1
