"""The local host: every component of a run in a process of its own, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from agentrl.cluster.rpc import RpcClient, connected
from agentrl.cluster.spec import RunSpec
from agentrl.config import RunConfig
from agentrl.device import compute_environment
from agentrl.record import AgentRLError
from agentrl.record.protocols import RolloutService, RolloutStatus, TrainerService, TrainerStatus
from agentrl.weights.segment import shared_memory_root

_STOP_SECONDS = 3.0
_POLL_SECONDS = 0.25
_SHADOW_SECONDS = 2.0
_LONGEST_SOCKET_PATH = 100


class ProcessFailed(AgentRLError):
    """A process of the run ended unexpectedly; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A look at a run in progress."""

    trainer: TrainerStatus
    rollout: RolloutStatus


@dataclass(slots=True)
class _Child:
    role: str
    process: asyncio.subprocess.Process
    log: Path


class LocalHost:
    """Starts the processes of a run, watches them, and leaves nothing behind: no process, no socket, no segment.

    Use as an async context manager; leaving it stops what still runs.

    Args:
        model_path: where the model's files are.
        plugin_paths: folders in which the user's own modules are looked for.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model_path: str, plugin_paths: tuple[str, ...]) -> None:
        self.run_dir = run_dir
        self._config = config
        self._model_path = model_path
        self._plugin_paths = plugin_paths
        self._children: list[_Child] = []
        self._folders: list[Path] = []

    async def __aenter__(self) -> LocalHost:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def states(self) -> AsyncIterator[RunState]:
        """The state of the run, a few times a second and at least once per training step, until training is done.

        Raises:
            ProcessFailed: a process ended that should not have.
        """
        rollout = RpcClient(self._spec.address("rollout"), RolloutService, name="rollout worker")
        trainer = RpcClient(self._spec.address("trainer"), TrainerService, name="trainer")
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
        trainer = next(child for child in self._children if child.role == "trainer")
        if await trainer.process.wait():
            raise self._failure(trainer)

    async def _while_alive(self, question: asyncio.Future[RunState]) -> RunState | None:
        """The answer, or None if the trainer ended well meanwhile."""
        exits = {asyncio.ensure_future(child.process.wait()): child for child in self._children}
        try:
            await asyncio.wait([question, *exits], return_when=asyncio.FIRST_COMPLETED)
            if question.done() and question.exception() is not None:
                # Often the shadow of a process that is about to end, whose own log says more.
                await asyncio.wait(exits, timeout=_SHADOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task, child in exits.items():
                if task.done() and (child.role != "trainer" or task.result()):
                    raise self._failure(child)
            return await question if question.done() else None
        finally:
            for task in (question, *exits):
                task.cancel()

    async def _start(self) -> None:
        config = self._config
        bucket_bytes = 2 * config.weights.bucket_mb * 2**20
        for root in {shared_memory_root(0), Path(tempfile.gettempdir())}:
            _remove_leftovers(root)
        name = f"agentrl-{os.getpid()}-{secrets.token_hex(4)}"
        sockets = _socket_folder(f"{name}-")
        self._folders.append(sockets)
        segments = shared_memory_root(bucket_bytes) / name
        segments.mkdir(mode=0o700)
        self._folders.append(segments)
        self._spec = RunSpec(
            config=config.model_dump(mode="json"),
            model_path=self._model_path,
            run_dir=str(self.run_dir),
            sockets=str(sockets),
            segments=str(segments),
            plugin_paths=self._plugin_paths,
            engines=config.rollout.n_gpus_per_node,
        )
        self._spec.write(sockets / "spec.json")
        (self.run_dir / "logs").mkdir()
        for role in self._spec.engine_roles():
            await self._spawn(role, compute_environment(config.rollout.threads))
        await self._spawn("trainer", compute_environment(config.trainer.threads))
        # Not for the rollout worker: what its agents and environments start would inherit the allocator's settings.
        await self._spawn("rollout", {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})

    async def _spawn(self, role: str, environment: dict[str, str]) -> None:
        log = self.run_dir / "logs" / f"{role}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                # -P: the current folder is no place for modules that would hide installed ones.
                *(sys.executable, "-P", "-m", "agentrl.cluster.process"),
                *(role, str(Path(self._spec.sockets) / "spec.json")),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                # Ctrl-C in the terminal reaches the supervisor alone, which then stops the others in order.
                start_new_session=True,
            )
        self._children.append(_Child(role, process, log))

    async def _stop(self) -> None:
        running = [child.process for child in self._children if child.process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in running:
            try:
                await asyncio.wait_for(process.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                process.kill()
                await process.wait()
        for child in self._children:
            # Whatever an agent or environment left behind in the process's session goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = []

    def _failure(self, child: _Child) -> ProcessFailed:
        lines = child.log.read_text(errors="replace").splitlines()[-15:]
        return ProcessFailed(
            f"the {child.role} process ended with status {child.process.returncode}; the end of {child.log}:\n"
            + "\n".join(f"  {line}" for line in lines)
        )


def _remove_leftovers(root: Path) -> None:
    """Removes the folders of runs whose every process was killed, so that none could."""
    for folder in root.glob("agentrl-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _socket_folder(prefix: str) -> Path:
    """A new temporary folder whose path is short enough for the address of a Unix socket (some 100 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder / "engine-000")) <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


def _state(trainer: TrainerService, rollout: RolloutService, seen: int) -> asyncio.Future[RunState]:
    async def ask() -> RunState:
        return RunState(await trainer.status(seen), await rollout.status())

    return asyncio.ensure_future(ask())
