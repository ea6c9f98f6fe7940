"""Finished groups on their way to the trainer, and the check that they are young enough when taken."""

from __future__ import annotations

from typing import Literal

from agentrl.record import Group
from agentrl.rollout.gate import StalenessGate

OnStale = Literal["wait", "drop", "requeue", "mask", "train"]


class Buffer:
    """The queue of finished groups. It can't overflow: the gate admits no more groups than fit.

    Args:
        batch_groups: groups of a batch.
        on_stale: `wait` forms batches so that no group passes the bound; `drop` and `requeue` give up those that did,
            `mask` those with nothing left within it; `train` trains them all the same.
    """

    def __init__(self, gate: StalenessGate, *, batch_groups: int, on_stale: OnStale) -> None:
        self._gate = gate
        self._batch_groups = batch_groups
        self._on_stale = on_stale
        self._groups: dict[str, Group] = {}
        self._oldest: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Queues a finished group."""
        oldest = group.oldest_version
        self._groups[group.id] = group
        self._oldest[group.id] = oldest
        self._gate.finished(group.id, oldest)

    def drop_stale(self) -> list[Group]:
        """Takes out the groups that can't be trained within the bound any more. Under `wait` there are none as long as
        new weights are published when the batches of the last ones are taken: see `StalenessGate.surplus`."""
        if self._on_stale == "train":
            return []
        stale = [group_id for group_id, oldest in self._oldest.items() if self._gate.is_stale(oldest)]
        if self._on_stale == "wait":
            surplus = self._gate.surplus()
            stale += [group_id for group_id in self._groups if group_id in surplus and group_id not in stale]
        if self._on_stale == "mask":
            stale = [group_id for group_id in stale if self._gate.is_stale(self._groups[group_id].newest_version)]
        for group_id in stale:
            self._gate.removed(group_id)
        return [self._remove(group_id) for group_id in stale]

    def take(self, *, last: bool = False) -> list[Group] | None:
        """The next batch, oldest groups first, or None if it can't be formed yet.

        Args:
            last: no further group will come, so that a smaller batch is in order.
        """
        if not self._groups or (len(self._groups) < self._batch_groups and not last):
            return None
        chosen = sorted(self._oldest, key=self._oldest.__getitem__)[: self._batch_groups]
        if self._on_stale == "wait" and not self._gate.may_take(set(chosen)):
            return None
        self._gate.taken(chosen)
        return [self._remove(group_id) for group_id in chosen]

    def clear(self) -> list[Group]:
        """Takes out everything."""
        for group_id in self._groups:
            self._gate.removed(group_id)
        return [self._remove(group_id) for group_id in list(self._groups)]

    def _remove(self, group_id: str) -> Group:
        del self._oldest[group_id]
        return self._groups.pop(group_id)
