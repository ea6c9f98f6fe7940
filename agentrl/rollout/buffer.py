"""Finished groups on their way to the trainer, and the check that they are young enough when taken."""

from __future__ import annotations

from typing import Literal

from agentrl.record import Group
from agentrl.rollout.gate import StalenessGate

OnStale = Literal["wait", "drop", "train"]


class Buffer:
    """The queue of finished groups. It can't overflow: the gate admits no more groups than fit.

    Args:
        batch_groups: groups of a batch.
        on_stale: `wait` forms batches so that no group passes the bound; `drop` gives up those that did; `train`
            trains them all the same.
    """

    def __init__(self, gate: StalenessGate, *, batch_groups: int, on_stale: OnStale) -> None:
        self._gate = gate
        self._batch_groups = batch_groups
        self._on_stale = on_stale
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Queues a finished group."""
        self._groups[group.id] = group
        self._gate.finished(group.id, group.oldest_version)

    def drop_stale(self) -> list[Group]:
        """Takes out the groups that would pass the bound now. Under `wait` there are none."""
        if self._on_stale == "train":
            return []
        stale = [group for group in self._groups.values() if self._gate.is_stale(group.oldest_version)]
        for group in stale:
            del self._groups[group.id]
            self._gate.removed(group.id)
        return stale

    def take(self, *, last: bool = False) -> list[Group] | None:
        """The next batch, oldest groups first, or None if it can't be formed yet.

        Args:
            last: no further group will come, so that a smaller batch is in order.
        """
        oldest_first = sorted(self._groups.values(), key=lambda group: group.oldest_version)
        chosen = oldest_first[: self._batch_groups]
        if not chosen or (len(chosen) < self._batch_groups and not last):
            return None
        ids = {group.id for group in chosen}
        if self._on_stale == "wait" and not self._gate.may_take(ids):
            return None
        for group_id in ids:
            del self._groups[group_id]
        self._gate.taken(ids)
        return chosen

    def clear(self) -> list[Group]:
        """Takes out everything."""
        groups = list(self._groups.values())
        for group in groups:
            self._gate.removed(group.id)
        self._groups = {}
        return groups
