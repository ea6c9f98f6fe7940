"""The local host of a training: every component in a process of its own, on this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl.cluster.process import STARTUP_FAILED
from agentrl.cluster.processes import PLAIN_ENVIRONMENT, Child, Processes, how_it_ended
from agentrl.cluster.rpc import RpcClient, connected
from agentrl.config import RunConfig
from agentrl.record.protocols import RolloutService, RolloutStatus, TrainerService, TrainerStatus

log = logging.getLogger(__name__)

_RESTART_SECONDS = 1.0
"""Pause before an engine is started for the third time; doubles with every further time."""
_POLL_SECONDS = 0.25
_SHADOW_SECONDS = 2.0
_LAST_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RunState:
    """A look at a run in progress."""

    trainer: TrainerStatus
    rollout: RolloutStatus


class LocalHost:
    """Starts the processes of a run, watches them, and leaves nothing behind: no process, no socket, no segment.

    An engine that dies is started again, `rollout.max_engine_restarts` times; after that the run does without it while
    another one is left. The end of any other process ends the run.

    Use as an async context manager; leaving it stops what still runs.

    Args:
        model_path: where the model's files are.
        plugin_paths: folders in which the user's own modules are looked for.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model_path: str, plugin_paths: tuple[str, ...]) -> None:
        self.run_dir = run_dir
        self._config = config
        self._processes = Processes(config, run_dir, model_path, plugin_paths)
        self._restarts: set[asyncio.Task[None]] = set()
        self._returning: set[str] = set()

    async def __aenter__(self) -> LocalHost:
        processes = await self._processes.__aenter__()
        try:
            for role in processes.spec.engine_roles():
                await processes.start_engine(role)
            await processes.start_trainer()
            await processes.start("rollout", PLAIN_ENVIRONMENT)
        except BaseException:
            await processes.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await self._processes.stop()

    async def states(self) -> AsyncIterator[RunState]:
        """The state of the run, a few times a second and at least once per training step, until training is done.

        Raises:
            ProcessFailed: a process ended that should not have.
        """
        self._rollout = rollout = RpcClient(
            self._processes.spec.address("rollout"), RolloutService, name="rollout worker"
        )
        trainer = RpcClient(self._processes.spec.address("trainer"), TrainerService, name="trainer")
        seen = 0
        async with connected(rollout, trainer):
            while True:
                state = await self._while_alive(_state(trainer.proxy, rollout.proxy, seen))
                if state is None:
                    return
                yield state
                if "step" in state.trainer.metrics:
                    seen = int(state.trainer.metrics["step"])
                elif state.trainer.phase == "done":
                    return
                else:
                    await asyncio.sleep(_POLL_SECONDS)

    async def wait_for_trainer(self) -> None:
        """Waits until the trainer has written everything and ended.

        Raises:
            ProcessFailed: it failed.
        """
        trainer = next(child for child in self._processes.children if child.role == "trainer")
        if await trainer.process.wait():
            raise self._processes.failure(trainer)

    async def _while_alive(self, question: asyncio.Future[RunState]) -> RunState | None:
        """The answer, or None if the trainer ended well meanwhile."""
        exits = {asyncio.ensure_future(child.process.wait()): child for child in self._processes.children}
        pending: set[asyncio.Future[Any]] = {question, *exits}
        try:
            while True:
                await asyncio.wait((*pending, *self._restarts), return_when=asyncio.FIRST_COMPLETED)
                if question.done() and question.exception() is not None:
                    # Often the shadow of a process that is about to end, whose own log says more.
                    alive = [task for task in exits if task in pending]
                    await asyncio.wait(alive, timeout=_SHADOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task, child in exits.items():
                    if task.done() and task in pending:
                        pending.discard(task)
                        if child.role == "trainer" and not task.result():
                            # It ends when its last answer is on the way; that of the rollout worker may still come.
                            await asyncio.wait((question,), timeout=_LAST_ANSWER_SECONDS)
                            return question.result() if question.done() and not question.exception() else None
                        self._replace(child)
                for restart in [restart for restart in self._restarts if restart.done()]:
                    self._restarts.discard(restart)
                    restart.result()
                if question.done():
                    return await question
        finally:
            for task in (question, *exits):
                task.cancel()

    def _replace(self, child: Child) -> None:
        """An engine that died is started anew, if it may be.

        Raises:
            ProcessFailed: the run can't go on without that process.
        """
        others = [other for other in self._processes.children if other is not child and other.role.startswith("engine")]
        again = child.process.returncode != STARTUP_FAILED and child.restarts < self._config.rollout.max_engine_restarts
        if not child.role.startswith("engine") or not (again or others or self._returning):
            raise self._processes.failure(child)
        self._processes.children.remove(child)
        self._processes.replaced.append(child)
        self._returning |= {child.role} if again else set()
        log.warning(
            "the %s process %s and %s; its log is %s",
            *(child.role, how_it_ended(child), "is started again" if again else "will be missed", child.log),
        )
        self._restarts.add(asyncio.ensure_future(self._restart(child, again)))

    async def _restart(self, child: Child, again: bool) -> None:
        await self._rollout.proxy.engine_lost(child.role, again)
        await self._processes.end_session(child)
        self._processes.replaced.remove(child)
        if again:
            await asyncio.sleep(_RESTART_SECONDS * (2**child.restarts - 1))
            await self._processes.start_engine(child.role, restarts=child.restarts + 1)
            self._returning.discard(child.role)
            await self._rollout.proxy.engine_restarted(child.role)


def _state(trainer: TrainerService, rollout: RolloutService, seen: int) -> asyncio.Future[RunState]:
    async def ask() -> RunState:
        return RunState(await trainer.status(seen), await rollout.status())

    return asyncio.ensure_future(ask())
