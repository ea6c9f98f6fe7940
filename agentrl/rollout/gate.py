"""The staleness gate: who may start, and which finished groups may be trained now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from agentrl.config import RunConfig


@dataclass(slots=True)
class _Live:
    """A group between admission and training. `oldest`: no trained token of it is older; `episodes`: still running."""

    oldest: int
    episodes: int = 0
    finished: bool = False


class StalenessGate:
    """Counts the groups between admission and training, and nobody else does.

    Invariants (B groups a batch, T batches between publications, eta, H as in the config):

    * admission: running + queued + taken since the last publication <= floor(B * T * (1 + eta));
    * consumption: a batch is formed only if everything it leaves behind can still be trained within H. For
      j = 0 .. max(H, 1) - 1, at most `B * (batches left before this publication) + j * B * T` groups that stay may
      have an oldest version <= v + j - H. So no finished work is ever too old, and with H >= eta this can't
      deadlock: no more groups live than there are places left plus eta * B * T.

    A running group counts at its admission version: an engine with older weights never serves it. Groups that are
    filtered, fail or are dropped leave all counts; their place is free again at once.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        sync_steps: int,
        eta: Fraction,
        max_lag: int,
        group_size: int,
        max_concurrent: int,
        version: int = 0,
    ) -> None:
        self.version = version
        self.taken_groups = 0
        self.batches_taken = 0
        self._batch = batch_groups
        self._sync_steps = sync_steps
        self._max_lag = max_lag
        self._group_size = group_size
        self._max_concurrent = max_concurrent
        self._limit = floor(batch_groups * sync_steps * (1 + eta))
        self._live: dict[str, _Live] = {}

    @classmethod
    def from_config(cls, config: RunConfig) -> StalenessGate:
        """The gate that a config describes."""
        return cls(
            batch_groups=config.groups_per_step,
            sync_steps=config.async_training.trigger_parameter_sync_step,
            eta=config.eta,
            max_lag=config.max_lag,
            group_size=config.episodes_per_group,
            max_concurrent=config.rollout.max_concurrent,
        )

    @property
    def running_episodes(self) -> int:
        return sum(group.episodes for group in self._live.values())

    @property
    def running_groups(self) -> int:
        return sum(not group.finished for group in self._live.values())

    @property
    def queued_groups(self) -> int:
        return sum(group.finished for group in self._live.values())

    @property
    def oldest(self) -> int | None:
        """The oldest version any live group may hold."""
        return min((group.oldest for group in self._live.values()), default=None)

    def capacity(self) -> int:
        """Groups that may be admitted now."""
        by_episodes = (self._max_concurrent - self.running_episodes) // self._group_size
        by_staleness = self._limit - (len(self._live) + self.taken_groups)
        return max(0, min(by_episodes, by_staleness))

    def admit(self, group_id: str, episodes: int | None = None) -> int:
        """Starts a group, of which `episodes` are played (default: all); returns its admission version."""
        if not self.capacity():
            raise RuntimeError("the gate is closed: check capacity() before admit()")
        self._live[group_id] = _Live(self.version, self._group_size if episodes is None else episodes)
        return self.version

    def episode_ended(self, group_id: str) -> None:
        """One member of a running group is done, however it ended; after `clear` nobody counts it any more."""
        if group_id in self._live:
            self._live[group_id].episodes -= 1

    def finished(self, group_id: str, oldest: int) -> None:
        """A group is ready to be trained; `oldest` is the oldest version among its trained tokens."""
        self._live[group_id] = _Live(oldest, finished=True)

    def removed(self, group_id: str) -> None:
        """A group left the path without being trained."""
        del self._live[group_id]

    def clear(self) -> None:
        """The run is over: nothing is running or queued any more."""
        self._live.clear()

    def taken(self, group_ids: Iterable[str]) -> None:
        """These groups form a batch."""
        for group_id in group_ids:
            del self._live[group_id]
            self.taken_groups += 1
        self.batches_taken += 1

    def published(self, version: int) -> None:
        """The engines have new weights."""
        if version <= self.version:
            raise ValueError(f"version {version} was published after {self.version}: versions never go back")
        self.version = version
        self.taken_groups = 0
        self.batches_taken = 0

    def may_take(self, group_ids: set[str]) -> bool:
        """Whether training on these groups now leaves only groups behind that can still be trained in time."""
        left = self._sync_steps - self.batches_taken - 1
        staying = [group.oldest for key, group in self._live.items() if key not in group_ids]
        for j in range(max(self._max_lag, 1)):
            due = sum(oldest <= self.version + j - self._max_lag for oldest in staying)
            if due > self._batch * left + j * self._batch * self._sync_steps:
                return False
        return True

    def surplus(self) -> set[str]:
        """Finished groups, the oldest ones, for which there are not enough batches left in time.

        There are none as long as new weights are published when the batches of the last ones are taken. An engine that
        has to be started anew between two publications may need newer weights sooner.
        """
        surplus: set[str] = set()
        for j in range(max(self._max_lag, 1)):
            due = [key for key, group in self._live.items() if group.oldest <= self.version + j - self._max_lag]
            places = self._batch * (self._sync_steps - self.batches_taken + j * self._sync_steps)
            finished = sorted((key for key in due if self._live[key].finished), key=lambda key: self._live[key].oldest)
            surplus.update(finished[: max(0, len(due) - places)])
        return surplus

    def lag(self, oldest: int) -> int:
        """How many versions a group lags behind the weights that would train it now."""
        return self.version - oldest

    def is_stale(self, oldest: int) -> bool:
        """Whether training it now would pass the bound."""
        return self.lag(oldest) > self._max_lag

    @property
    def min_version(self) -> int:
        """The oldest version that may be trained now."""
        return self.version - self._max_lag
