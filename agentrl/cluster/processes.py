"""The processes of a run on this machine: started together, and gone together, whatever happens."""

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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from agentrl.cluster.spec import RunSpec
from agentrl.config import RunConfig
from agentrl.device import compute_environment, get_device
from agentrl.record import AgentRLError
from agentrl.weights.segment import shared_memory_root

_STOP_SECONDS = 3.0
_SESSION_SECONDS = 2.0
_TRACKER_SECONDS = 1.0
_LONGEST_SOCKET_PATH = 100
PLAIN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
"""Of a process that plays episodes. Not the allocator's settings of those that compute: what agents and environments
start would inherit them. The hash seed, because some generated data sets depend on the order of Python's sets."""


class ProcessFailed(AgentRLError):
    """A process of the run ended unexpectedly; carries the end of its log."""


@dataclass(slots=True, eq=False)
class Child:
    """A process in its role.

    Attributes:
        restarts: how often another one was in this role before.
    """

    role: str
    process: asyncio.subprocess.Process
    log: Path
    restarts: int = 0


class Processes:
    """Starts processes by role and leaves nothing behind: no process, no socket, no segment.

    Use as an async context manager; leaving it stops what still runs.

    Args:
        model_path: where the model's files are.
        plugin_paths: folders in which the user's own modules are looked for.

    Attributes:
        children: those that run, or ran last in their role.
        replaced: those that ended, whose session has yet to.
        spec: what they are told; there once the context is entered.
    """

    spec: RunSpec

    def __init__(self, config: RunConfig, run_dir: Path, model_path: str, plugin_paths: tuple[str, ...]) -> None:
        self.run_dir = run_dir
        self.children: list[Child] = []
        self.replaced: list[Child] = []
        self._config = config
        self._model_path = model_path
        self._plugin_paths = plugin_paths
        self._folders: list[Path] = []
        self._pipe: tuple[int, ...] = ()

    async def __aenter__(self) -> Processes:
        try:
            self._pipe = os.pipe()
            self._make_folders()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _make_folders(self) -> None:
        config = self._config
        for root in {shared_memory_root(0), Path(tempfile.gettempdir())}:
            _remove_leftovers(root)
        name = f"agentrl-{os.getpid()}-{secrets.token_hex(4)}"
        sockets = _socket_folder(f"{name}-")
        self._folders.append(sockets)
        segments = shared_memory_root(2 * config.weights.bucket_mb * 2**20) / name
        segments.mkdir(mode=0o700)
        self._folders.append(segments)
        self.spec = RunSpec(
            config=config.model_dump(mode="json"),
            model_path=self._model_path,
            run_dir=str(self.run_dir),
            sockets=str(sockets),
            segments=str(segments),
            plugin_paths=self._plugin_paths,
            engines=config.engines,
        )
        self.spec.write(sockets / "spec.json")
        (self.run_dir / "logs").mkdir()

    async def start_engine(self, role: str, *, restarts: int = 0) -> None:
        """Starts an engine."""
        environment = compute_environment(self._config.rollout.threads) | self._device_environment()
        await self.start(role, environment, restarts=restarts)

    async def start_trainer(self) -> None:
        """Starts the trainer."""
        allocator = get_device(self._config.trainer.device).allocator_environment()
        environment = compute_environment(self._config.trainer.threads) | self._device_environment() | allocator
        await self.start("trainer", environment)

    def _device_environment(self) -> dict[str, str]:
        """Of processes that take part in a process group of the weights, if they do."""
        config = self._config
        if config.weight_transport != "collective":
            return {}
        device = get_device(config.trainer.device)
        shared = device.count() < 1 + config.engines * config.rollout.tensor_parallel_size
        return device.collective_environment(config.weights.timeout, shared=shared)

    async def start(self, role: str, environment: dict[str, str], *, restarts: int = 0) -> None:
        """Starts the process of a role, with these variables on top of this process's environment."""
        log = self.run_dir / "logs" / f"{role}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                # -P: the current folder is no place for modules that would hide installed ones.
                *(sys.executable, "-P", "-m", "agentrl.cluster.process"),
                *(role, str(Path(self.spec.sockets) / "spec.json")),
                # Not a pipe of its own: what it forks would hold that too, and keep asyncio from noticing its end.
                stdin=self._pipe[0],
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                # Ctrl-C in the terminal reaches the supervisor alone, which then stops the others in order.
                start_new_session=True,
            )
        self.children.append(Child(role, process, log, restarts))

    async def stop(self) -> None:
        """Stops what runs and removes what the processes shared; to its end, even if cancelled meanwhile."""
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise

    async def _stop(self) -> None:
        running = [child.process for child in self.children if child.process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in running:
            try:
                await asyncio.wait_for(process.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await asyncio.gather(*map(self.end_session, [*self.children, *self.replaced]))
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        for end in self._pipe:
            os.close(end)
        self._folders, self._pipe = [], ()

    async def end_session(self, child: Child) -> None:
        """Whatever a process left behind goes with it: what an agent or environment started, an engine's workers. What
        removes their shared memory after them, Python's resource tracker, goes last."""
        group = child.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
            await _until_empty(group, _SESSION_SECONDS)
            for process in _members(group):
                with contextlib.suppress(psutil.Error):
                    if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                        process.kill()
            await _until_empty(group, _TRACKER_SECONDS)
            os.killpg(group, signal.SIGKILL)

    def failure(self, child: Child) -> ProcessFailed:
        """What to raise because of the end of a process."""
        text = child.log.read_text(errors="replace").replace("\r", "\n")
        lines = [line for line in text.splitlines() if line.strip() and "Loading weights:" not in line]
        # What a process says of its own end is all there is to say; else what happened last.
        told = max((number for number, line in enumerate(lines) if " ERROR agentrl: " in line), default=-15)
        lines = lines[told:]
        log = f"the end of {child.log}:\n" + "\n".join(f"  {line}" for line in lines)
        return ProcessFailed(
            f"the {child.role} process {how_it_ended(child)}; {log if lines else f'its log, {child.log}, says nothing'}"
        )


def how_it_ended(child: Child) -> str:
    status = child.process.returncode or 0
    if status >= 0:
        return f"ended with status {status}"
    hint = " (killed from outside: perhaps the machine ran out of memory)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"


async def _until_empty(group: int, seconds: float) -> None:
    """Waits until the processes of a group have ended, or so long."""
    deadline = time.monotonic() + seconds
    pause = 0.01
    while _members(group) and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)


def _members(group: int) -> list[psutil.Process]:
    """The processes of a group; not those that have ended and that nobody has asked for their status yet, which in a
    container may be for ever."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                members += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return members


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
