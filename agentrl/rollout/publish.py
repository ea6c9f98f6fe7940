"""New weights to all engines at once, while episodes and environments keep running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from agentrl.record import EngineError
from agentrl.record.protocols import Bucket, Engine, PublishReport
from agentrl.rollout.router import Replica, Router


class PublishCoordinator:
    """One publication at a time: pause, load, resume.

    Engines that wait for weights take part and enter service with it. An engine that fails on the way leaves service;
    the others go on.

    Args:
        timeout: seconds an engine may take for any one step.
    """

    def __init__(self, router: Router, *, timeout: float = 120.0) -> None:
        self._router = router
        self._timeout = timeout
        self._loading: list[Replica] = []
        self._paused = 0.0

    @property
    def loading(self) -> list[str]:
        """Names of the engines that take the current publication."""
        return [replica.name for replica in self._loading]

    async def begin(self, *, joining_only: bool = False) -> None:
        """Pauses the engines and prepares them for new weights.

        Raises:
            EngineError: there is none.
        """
        router = self._router
        self._loading = [*([] if joining_only else router.serving), *router.joining]
        if not self._loading:
            raise EngineError(f"no engine {'waits for' if joining_only else 'is left to take the'} weights")
        await self._each(lambda engine: engine.pause())
        self._paused = time.perf_counter()
        await self._each(lambda engine: engine.start_weight_update())

    async def bucket(self, bucket: Bucket) -> None:
        """Gives every engine a bucket; returns when it may be reused."""
        await self._each(lambda engine: engine.update_weights(bucket))

    async def finish(self, version: int, *, drained_seconds: float = 0.0) -> PublishReport:
        """Puts the new weights into service.

        Raises:
            EngineError: no engine accepted them.
        """
        await self._each(lambda engine: engine.finish_weight_update(version))
        await self._each(lambda engine: engine.resume())
        now = time.perf_counter()
        loaded, self._loading = self._loading, []
        for replica in loaded:
            self._router.serve(replica, version)
        return PublishReport(version, now - self._paused, drained_seconds, len(loaded))

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """One step on all engines. Two buckets are on their way at a time: an engine may fail both."""
        loading = [replica for replica in self._loading if not replica.lost.is_set()]
        results = await asyncio.gather(
            *(replica.ask(call(replica.engine), self._timeout) for replica in loading), return_exceptions=True
        )
        problems: list[str] = []
        for replica, result in zip(loading, results, strict=True):
            if isinstance(result, BaseException):
                problems.append(str(result))
                self._router.fail(replica, f"weight update: {type(result).__name__}: {result}")
        self._loading = [replica for replica in self._loading if not replica.lost.is_set()]
        if not self._loading:
            raise EngineError("no engine accepted the weight update: " + ("; ".join(problems) or "all are gone"))
