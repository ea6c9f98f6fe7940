"""New weights to all engines at once, while episodes and environments keep running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from agentrl.record import EngineError, PeerLost, WeightTransferError
from agentrl.record.protocols import Bucket, PauseMode, PublishReport, WeightGroup, WeightReceivers
from agentrl.rollout.router import Replica, Router

_MOST_FAILURES = 3
"""Updates in a row that an engine may fail before the run does without it."""


class PublishCoordinator:
    """One publication at a time: pause, load, resume.

    Engines that wait for weights take part and enter service with it. An engine that fails on the way is out of
    service until all of an update has reached it: it stays paused, its requests with it. One that does not answer, or
    that fails update after update, leaves for good. The others go on.

    Args:
        timeout: seconds an engine may take for any one step.
        pause: what becomes of running requests.
    """

    def __init__(self, router: Router, *, timeout: float = 120.0, pause: PauseMode = "keep") -> None:
        self._router = router
        self._timeout = timeout
        self._pause: PauseMode = pause
        self._loading: list[Replica] = []
        self._paused = 0.0
        self._number = 0

    @property
    def loading(self) -> list[str]:
        """Names of the engines that take the current publication."""
        return [replica.name for replica in self._loading]

    async def begin(self, *, joining_only: bool = False) -> WeightReceivers:
        """Pauses the engines and prepares them for new weights.

        Args:
            joining_only: only engines that wait for weights; those in service go on.

        Raises:
            EngineError: there is none.
        """
        router = self._router
        self._number += 1
        self._loading = [*([] if joining_only else router.serving), *router.joining]
        if not self._loading:
            raise EngineError(f"no engine {'waits for' if joining_only else 'is left to take the'} weights")
        await self._each(lambda replica: replica.engine.pause(self._pause))
        self._paused = time.perf_counter()
        await self._each(lambda replica: replica.engine.start_weight_update())
        await self._each(self._count_workers)
        workers = tuple(replica.workers or 1 for replica in self._loading)
        return WeightReceivers(tuple(replica.id for replica in self._loading), workers)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Has the engines of this publication enter a process group, one after the other's ranks.

        Raises:
            EngineError: none could.
        """
        ends = list(accumulate((replica.workers or 1 for replica in self._loading), initial=group.rank))
        ranks = dict(zip(self._loading, ends[:-1], strict=True))
        await self._each(lambda replica: replica.engine.join_weight_group(replace(group, rank=ranks[replica])))

    async def bucket(self, bucket: Bucket) -> None:
        """Gives every engine a bucket; returns when it may be reused."""
        await self._each(lambda replica: replica.engine.update_weights(bucket))

    async def finish(self, version: int, *, drained_seconds: float = 0.0) -> PublishReport:
        """Puts the new weights into service.

        Raises:
            EngineError: no engine accepted them.
        """
        await self._each(lambda replica: replica.engine.finish_weight_update(version))
        await self._each(lambda replica: replica.engine.resume())
        now = time.perf_counter()
        loaded, self._loading = self._loading, []
        for replica in loaded:
            self._router.serve(replica, version)
        return PublishReport(version, now - self._paused, drained_seconds, len(loaded))

    def abandon(self, reason: str) -> None:
        """The sender failed: engines that took part so far have a mixture, and wait for all weights."""
        self._number += 1
        loading, self._loading = list(self._still_loading()), []
        for replica in loading:
            self._drop(replica, WeightTransferError(reason))

    async def _count_workers(self, replica: Replica) -> None:
        if replica.workers is None:
            replica.workers = (await replica.engine.stats()).workers

    async def _each(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """One step on all engines. Two buckets are on their way at a time: an engine may fail both."""
        number, loading = self._number, list(self._still_loading())
        results = await asyncio.gather(
            *(replica.ask(call(replica), self._timeout) for replica in loading), return_exceptions=True
        )
        if number != self._number:
            raise EngineError("the publication was abandoned")
        problems: list[str] = []
        for replica, result in zip(loading, results, strict=True):
            if isinstance(result, BaseException):
                problems.append(str(result))
                if replica in self._still_loading():
                    self._loading.remove(replica)
                    self._drop(replica, result)
        self._loading = list(self._still_loading())
        if not self._loading:
            raise EngineError("no engine accepted the weight update: " + ("; ".join(problems) or "all are gone"))

    def _still_loading(self) -> Iterator[Replica]:
        return (replica for replica in self._loading if not replica.lost.is_set())

    def _drop(self, replica: Replica, error: BaseException) -> None:
        """An engine that answered may try again with the whole update; one that did not is gone."""
        reason = f"weight update: {type(error).__name__}: {error}"
        replica.failed_updates += 1
        if isinstance(error, PeerLost) or replica.failed_updates >= _MOST_FAILURES:
            self._router.fail(replica, reason)
        else:
            self._router.rejoin(replica, reason)
