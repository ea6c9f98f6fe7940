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

    An engine that fails on the way leaves service; the others go on. Engines are resumed whatever happens.

    Args:
        timeout: seconds an engine may take for any one step.
    """

    def __init__(self, router: Router, *, timeout: float = 120.0) -> None:
        self._router = router
        self._timeout = timeout
        self._loading: list[Replica] = []
        self._paused = 0.0

    async def begin(self) -> None:
        """Pauses the engines and prepares them for new weights."""
        self._loading = list(self._router.serving)
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
        for replica in self._loading:
            replica.version = version
        await self._each(lambda engine: engine.resume())
        now = time.perf_counter()
        return PublishReport(version, now - self._paused, drained_seconds, len(self._loading))

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        results = await asyncio.gather(
            *(asyncio.wait_for(call(replica.engine), self._timeout) for replica in self._loading),
            return_exceptions=True,
        )
        failed: list[tuple[Replica, BaseException]] = []
        for replica, result in zip(self._loading, results, strict=True):
            if isinstance(result, BaseException):
                failed.append((replica, result))
        for replica, error in failed:
            self._router.fail(replica, f"weight update: {type(error).__name__}: {error}")
            self._loading.remove(replica)
        if not self._loading:
            raise EngineError("no engine accepted the weight update: " + "; ".join(str(error) for _, error in failed))
